"""Cases that `make test` leaves to `make test-slow`."""

from typing import Any

import pytest

import patches

# `ENGINEPOOL_OPTIMISATIONS=0` leaves every decode step to upstream.
steady_decode = pytest.mark.skipif(not patches.optimising(), reason="decode is not steady")


def slow(*cases: Any) -> list[Any]:
    """The cases of a parametrization, marked as slow. A tuple has the arguments of one case."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
