"""Every Python block of README.md and docs/ runs as it is printed. A page is one program, in order.

Blocks that need a package of another environment are in tests/integrations/test_pages.py.
"""

from typing import Any

import numpy as np
import pytest

from tests.support.pages import PAGES, blocks, run
from tests.support.pools import MakePool
from tests.support.servers import serving

# A page opens several pools, and each compiles.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_page(page: str, **instead: str) -> dict[str, Any]:
    """Run a page. Returns the names that its blocks have defined."""
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if block.needs is None:
            there = {printed: used for printed, used in instead.items() if printed in block.code}
            run(page, block, names, there)
    return names


def test_no_page_is_left_out() -> None:
    """Each page with blocks has a test below."""
    with_blocks = {
        page for page in PAGES if any(block.needs is None for block in blocks(page, "python"))
    }
    assert with_blocks == {
        "README.md",
        "docs/generation.md",
        "docs/lora.md",
        "docs/scoring.md",
        "docs/serving.md",
        "docs/structured_output.md",
        "docs/training.md",
        "docs/weights.md",
    }


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what its comments say. After its loop the pool has the last step's weights."""
    names = run_page("README.md")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "['19', '34']"
    assert said[1] in {"0", "1", "2", "3"}
    assert said[2:4] == ["['5', '26']", "1"]
    steps = [line.split()[:2] for line in said[4:]]
    assert steps[0] == ["0", "0.0"]
    assert steps[1][0] == "1"
    assert float(steps[1][1]) >= 13
    assert len(names["results"]) == 16
    assert {r["meta_info"]["weight_version"] for r in names["results"]} == {1}


def test_generation() -> None:
    names = run_page("docs/generation.md")
    assert len(names["outputs"]) == 16
    assert len(names["some"]) == 2


def test_lora() -> None:
    """One output uses the adapter, the other the base."""
    adapted, base = (result["meta_info"] for result in run_page("docs/lora.md")["outputs"])
    assert adapted["lora_path"] == "run-1"
    assert [span[2] for span in adapted["lora_versions"]] == [1]
    assert base.get("lora_path") is None


def test_scoring() -> None:
    names = run_page("docs/scoring.md")
    assert names["result"]["meta_info"]["input_token_logprobs"][0][0] is None


def test_structured_output() -> None:
    names = run_page("docs/structured_output.md")
    assert 1 <= len(names["digits"]) <= 3
    assert names["digits"].isdigit()


def test_weights() -> None:
    """The toy adds, and then subtracts."""
    names = run_page("docs/weights.md")
    assert names["before"] == "19"
    assert names["after"]["text"] == "5"
    assert names["after"]["meta_info"]["weight_version"] == "step-1"


def test_training() -> None:
    """Trainer and engines agree on every token."""
    names = run_page("docs/training.md")
    assert len(names["results"]) == 24
    agreement = names["agreement"]
    assert agreement.mean == pytest.approx(1, abs=1e-3)
    assert [agreement.min, agreement.max] == pytest.approx([1, 1], abs=1e-3)
    assert np.mean(names["rewards"]) > 0.5
    assert names["advantages"].shape == (24,)
    assert str(agreement).startswith("ratio 1.0000 (")


def test_serving(keep_pool: MakePool) -> None:
    """With a server of the toy, on another port."""
    with serving(keep_pool("toy", 2)) as running:
        names = run_page("docs/serving.md", **{"http://127.0.0.1:31000": running.url()})
        names["client"].close()
    assert len(names["reply"].choices) == 4
