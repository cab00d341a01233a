"""A JAX program of several processes has a pool in each, on the process's own devices."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import pytest

from enginepool.process.single_process import as_single_process
from tests.support.forced import assert_greedy
from tests.support.liveness import SECONDS, callers, until
from tests.support.xla import QUICK_TO_COMPILE

# Two processes, each with a pool.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OUTPUTS = ("out", "err")


@pytest.fixture(scope="module")
def models(model_dir: Callable[[str], Path], target: Callable[[str], Path]) -> dict[str, Path]:
    return {"old": model_dir("qwen3"), "new": target("qwen3")}


def free_port() -> int:
    """A port below those that Linux assigns by itself, because another process might get such a
    port before ours binds it."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def both(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    port = free_port()
    environment = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE}
    folder = tmp_path_factory.mktemp("output")
    with ExitStack() as stack:
        processes = []
        for number in range(2):
            out, err = (stack.enter_context((folder / f"{n}{number}").open("w")) for n in OUTPUTS)
            arguments = [number, port, folder, models["old"], models["new"]]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.two_processes", *map(str, arguments)],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=err,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        # If one fails, the other waits at a barrier.
        until(
            lambda: any(p.poll() for p in processes) or all(p.poll() == 0 for p in processes),
            2 * SECONDS,
        )
        ends = [process.poll() for process in processes]
    said = [(folder / f"err{number}").read_text()[-3000:] for number in range(2)]
    assert ends == [0, 0], "\n\n".join(said)
    return [json.loads((folder / f"out{n}").read_text().splitlines()[-1]) for n in range(2)]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("old", "old"),
        ("failed", "old"),
        ("rebuilt", "old"),
        ("replicated", "new"),
        ("names", "old"),
        ("within", "new"),
        ("untouched", "new"),
        ("gathered", "old"),
    ],
)
def test_each_serves(
    both: list[dict[str, Any]], models: dict[str, Path], name: str, model: str
) -> None:
    """Each process opens, rebuilds an engine, updates and answers alone, while the other does
    nothing. Its own part of a source is enough if that part is the whole source, in one piece or
    in several."""
    for found in both:
        served = found[name]
        assert assert_greedy(models[model], served["prompts"], served["results"]) >= 12
        used = {result["meta_info"]["engine_index"] for result in served["results"]}
        assert used <= {0, 1}
        assert found["recovered by"] == "rebuild"
    assert len(both[0][name]["results"]) != len(both[1][name]["results"])
    assert set(both[0]["devices"]).isdisjoint(both[1]["devices"])


def test_replicated_arrays_are_shared(both: list[dict[str, Any]]) -> None:
    """A replicated global array is not copied for this process's engines."""
    for found in both:
        for name in ("replicated", "gathered"):
            first, second = found[f"{name} shared"]
            assert first == second > 10
        for name in ("replicated", "names", "within", "gathered"):
            assert found[f"{name} checksum"] == both[0][f"{name} checksum"]
        assert found["replicated checksum"] == found["within checksum"]
        assert found["names checksum"] == found["gathered checksum"]


def test_a_partial_array_is_refused(both: list[dict[str, Any]]) -> None:
    """The error has the collective that the trainer must run. Nothing was changed."""
    for found in both:
        assert "has 2 of the 4 parts" in found["across"]
        assert "model.norm.scale: " in found["there"]
        assert "has 0 of the 1 parts" in found["there"]
        assert "jax.jit(lambda tree: tree, out_shardings=" in found["across"]
        assert found["across checksum"] == found["within checksum"]


def test_devices_of_another_process(both: list[dict[str, Any]]) -> None:
    for number, found in enumerate(both):
        assert f"belongs to process {1 - number}" in found["elsewhere"]
        assert found["processes"] == [2, number]


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that an engine's build gets are for its thread only. Overlapping threads leave
    JAX as it was."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    before = (jax.process_count, jax.process_index)

    def seen() -> tuple[int, int]:
        return jax.process_count(), jax.process_index()

    entered, leave = threading.Event(), threading.Event()

    def build() -> tuple[int, int]:
        with as_single_process(), as_single_process():
            entered.set()
            assert leave.wait(SECONDS)
            return seen()

    with callers(1) as executor:
        building = executor.submit(build)
        assert entered.wait(SECONDS)
        assert seen() == (4, 3)
        with as_single_process():
            assert seen() == (1, 0)
            leave.set()
            assert building.result(SECONDS) == (1, 0)
            assert seen() == (1, 0)
        assert seen() == (4, 3)
    assert (jax.process_count, jax.process_index) == before
