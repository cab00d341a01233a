"""Scripts that do not close their pool, and processes that fork while a pool is open."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, PoolClosed
from tests.support.faults import hang_in_step
from tests.support.liveness import SECONDS, callers, running, until
from tests.support.pools import SMALL

SCRIPT = Path(__file__).parents[1] / "support" / "exit_script.py"


def run(name: str, model: Path, *options: str) -> tuple[str, str]:
    """The output of a program of exit_script.py. It must end with 0 by itself."""
    made_with = json.dumps(SMALL | {"warmup": "none"})
    process = subprocess.run(
        # -P: otherwise the folder tests/support comes before every package.
        [sys.executable, "-P", *options, SCRIPT, name, model, made_with],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["function", "module", "cycle", "traceback", "daemons"])
def test_forgotten(model_dir: Callable[[str], Path], name: str) -> None:
    """Python ends without output, wherever the pool is stored and whatever runs. If such
    warnings are enabled, there is one ResourceWarning."""
    model = model_dir("qwen3")
    assert run(name, model) == ("", "")
    out, err = run(name, model, "-W", "always::ResourceWarning:__main__", "-W",
                   "always::ResourceWarning:sys")  # fmt: skip
    assert out == ""
    warning, *rest = err.splitlines()
    assert "ResourceWarning: " in warning
    assert "enginepool-0" in warning
    assert all(line.startswith(" ") or "Enable tracemalloc" in line for line in rest)


@pytest.mark.slow
def test_forked_child(model_dir: Callable[[str], Path]) -> None:
    """Every call to the parent's pool raises at once. The error says in which process the pool
    was opened, and what to do. Closing it does nothing, the child ends by itself, and the parent
    is not affected."""
    out, err = run("forked", model_dir("qwen3"))
    assert err == ""
    report = json.loads(out)
    assert report["lengths"] == [400] * 4 + [4]
    for child, found, code in report["children"]:
        assert code == 0
        assert found.pop("close") == found.pop("aclose") == "None"
        assert f"[open in process {report['pid']}]" in found.pop("repr")
        assert len(found) > 15
        for name, said in found.items():
            assert said.startswith("ForkedProcess: "), (name, said)
            for word in (f"process {report['pid']}", f"process {child}", "spawn", "in the child"):
                assert word in said, name


@pytest.mark.parametrize("verb", ["generate_all", "stream", "as_completed"])
def test_results_of_a_closed_pool(model_dir: Callable[[str], Path], verb: str) -> None:
    """A call that waits when the pool closes raises PoolClosed with the results so far: every
    sample in its place, and the finished one complete."""
    pool = EnginePool(str(model_dir("qwen3")), devices=1, **SMALL | {"warmup": "none"}).open()
    params = [
        {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": length} for length in (1, 400)
    ]

    def call() -> Any:
        return list(getattr(pool, verb)(input_ids=[[65, 66]] * 2, sampling_params=params))

    channel, hang = pool.runtime.workers[0].channel, hang_in_step(pool, 0, at=9)
    with callers(2) as executor:
        try:
            answer = executor.submit(call)
            assert hang.begun.wait(SECONDS)
            assert (running(pool), pool.stats()["finished"]) == (1, 1)
            closing = executor.submit(pool.close)
            until(channel.has_jobs)
        finally:
            hang.set()
        closing.result(SECONDS)
        with pytest.raises(PoolClosed) as caught:
            answer.result(SECONDS)
    first, second = caught.value.results
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert second["meta_info"]["finish_reason"]["err_type"] == "PoolClosed"
    assert 0 < len(second["output_ids"]) < 400
    with pytest.raises(PoolClosed) as caught:
        pool.generate("a")
    assert caught.value.results == []
