"""The README's example of `enginepool.rl`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_example() -> None:
    """It runs as it is printed, and says what the README says that it does."""
    code = README.split("<!-- rl -->\n```python\n")[1].split("```\n<!-- /rl -->")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    agreement = names["agreement"]
    assert agreement.mean == pytest.approx(1, abs=1e-3)
    assert [agreement.min, agreement.max] == pytest.approx([1, 1], abs=1e-3)
    assert np.mean(names["rewards"]) > 0.5
    assert names["advantages"].shape == (24,)
    assert str(agreement).startswith("ratio 1.0000 (")
