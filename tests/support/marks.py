"""Cases that `make test` leaves to `make test-slow`."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The cases of a parametrization, marked; a tuple is the arguments of one."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
