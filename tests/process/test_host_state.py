"""A pool leaves its process as it found it. Upstream's own start-up, checked in the same way,
does not. Each program runs in its own process (host_state_script.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Program


def new_values(difference: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Names in the JAX configuration whose values have changed."""
    before, after = difference.get("jax config", [{}, {}])
    return [name for name in before if before[name] != after.get(name)]


def at_exit(difference: dict[str, Any]) -> set[str]:
    """The packages that have registered exit callbacks."""
    return {module.split(".")[0] for module in difference.get("atexit", [[], []])[1]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_host_state_stays() -> None:
    """After a pool's life the process is as before, in everything that a library could change.
    While the pool is open, the exceptions are its threads, the process that tries grammars, its
    memory and its event loop. Nothing is printed. Upstream's Engine, started as its users do,
    changes most of the list."""
    ours, theirs = Program("pool", warmup="none"), Program("upstream")
    report, printed = ours.report()
    assert printed == ""
    assert report["import"].keys() <= {"random"}
    assert "sgl_jax.srt.entrypoints.engine" not in report["imported"]

    # Libraries that the first pool imports register exit callbacks, and XLA and the tokenizer
    # start thread pools that never end. They are there when the second pool opens.
    once = {"native threads", "atexit", "jax config"}
    assert report["constructor"].keys() <= {"atexit"}
    # JAX keeps a number from the first step with a mask.
    assert report["closed"].pop("device memory", [0, 0])[1] <= 8
    assert report["closed"].keys() <= once
    assert report["second life"] == {}
    assert not at_exit(report["closed"]) & {"enginepool", "sgl_jax"}
    # JAX's test utilities, which upstream imports, define configuration names of their own.
    assert new_values(report["closed"]) == new_values(report["open"]) == []
    assert report["open"].keys() <= once | {"threads", "children", "open files", "device memory"}
    assert report["child lives"]

    report, _ = theirs.report()
    for name in (
        "threads",
        "signal handlers",
        "event loop policy",
        "random",
        "numpy random",
        "environment",
        "temp files",
        "open files",
        "threading exit",
        "resource tracker",
        "device memory",
    ):
        assert name in report["closed"], name
    assert "sgl_jax" in at_exit(report["closed"])
    assert not report["child lives"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_pools_in_a_row() -> None:
    """Each pool is dropped without closing. Memory, threads and files after the tenth are as
    after the first, and the process grows by less than a tenth."""
    report, printed = Program("cards").report()
    left = report["left"]
    assert len(left) == 10
    assert {entry["arrays"] for entry in left} == {left[0]["arrays"]}
    for name in ("threads", "native threads", "open files"):
        assert left[-1][name] <= left[0][name], name
    assert left[-1]["rss"] < 1.1 * left[1]["rss"]
    assert printed == ""


def test_constructor_starts_nothing(model_dir: Callable[[str], Path]) -> None:
    """Importing enginepool and making a pool starts no thread, not even a native one, and no JAX
    backend. It imports no engine, and changes no signals, event loops or exit hooks."""
    report, printed = Program("start").report()
    name = report.pop("repr")
    assert "not open yet" in name
    assert report == {
        "imported engine": False,
        "import threads": 0,
        "constructor threads": 0,
        "python threads": 1,
        "jax started": False,
        "hooks": True,
        "signals": True,
        "devices": -1,
    }
    assert printed == ""
