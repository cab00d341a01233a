"""What a pool reports while it starts: a line on a terminal, events, and figures."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jax._src import monitoring
from sgl_jax.srt.managers.tp_worker import ModelWorker

from enginepool import EnginePool
from enginepool.engine.executable_cache import ExecutableCache
from tests.support.liveness import until
from tests.support.pools import SMALL, open_with

ENGINE_STAGES = {"import", "build", "read_weights", "check", "warm_up"}


class Terminal:
    """A terminal in place of standard error. Its input is read as it comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._master, slave = os.openpty()
        self.file = os.fdopen(slave, "w")
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", self.file)

    def _read(self) -> None:
        try:
            while read := os.read(self._master, 4096):
                self.text += read.decode()
        except OSError:  # the writer has closed it
            os.close(self._master)


@pytest.fixture
def slow_warm_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """A warm-up that has begun waits for a condition."""

    def wait_for(condition: Callable[[], bool]) -> None:
        run = ModelWorker.run_precompile

        def waiting(*args: Any, **kwargs: Any) -> Any:
            until(condition)
            return run(*args, **kwargs)

        monkeypatch.setattr(ModelWorker, "run_precompile", waiting)

    return wait_for


# pytest sets standard error again after the fixtures, so the tests make the terminal.


def test_terminal_line(
    monkeypatch: pytest.MonkeyPatch,
    slow_warm_up: Callable[..., None],
    model_dir: Callable[[str], Path],
) -> None:
    """On a terminal one line says which engine does what. It disappears when the pool serves."""
    terminal = Terminal(monkeypatch)
    slow_warm_up(lambda: "engine 1 of 1 warms up" in terminal.text)
    with EnginePool(str(model_dir("qwen3")), devices=1, **SMALL), terminal.file:
        until(lambda: terminal.text.endswith("\x1b[2K"))


def test_no_line(monkeypatch: pytest.MonkeyPatch, model_dir: Callable[[str], Path]) -> None:
    """With `progress=False` there is no line on a terminal either."""
    terminal = Terminal(monkeypatch)
    options = SMALL | {"warmup": "none", "progress": False}
    with EnginePool(str(model_dir("qwen3")), devices=1, **options), terminal.file:
        print("mine", end="", file=terminal.file, flush=True)
        until(lambda: terminal.text == "mine")


class Tee:
    """A program's own standard stream."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""


def test_streams_that_only_write(
    monkeypatch: pytest.MonkeyPatch, model_dir: Callable[[str], Path]
) -> None:
    """Neither the line nor the bar asks them for more."""
    monkeypatch.setattr(sys, "stdout", Tee())
    monkeypatch.setattr(sys, "stderr", Tee())
    with EnginePool(str(model_dir("qwen3")), devices=1, **SMALL | {"warmup": "none"}) as pool:
        (result,) = pool.generate_all(["a"], {"max_new_tokens": 2}, progress=True)
    assert len(result["output_ids"]) == 2


def test_figures(
    monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache, model_dir: Callable[[str], Path]
) -> None:
    """`stats()` has the seconds of a start by stage, and how many of them JAX took."""
    open_with(monkeypatch, ExecutableCache(one_cache.serialized))  # nothing is traced yet
    with EnginePool(str(model_dir("qwen3")), devices=2, **SMALL) as pool:
        stats = pool.stats()
    assert set(stats["start"]["seconds"]) == {"patches", "checkpoint", "engines", "front_end"}
    for engine in stats["engines"]:
        start = engine["start"]
        first = engine["engine_index"] == 0
        assert set(start["seconds"]) == (ENGINE_STAGES if first else ENGINE_STAGES - {"check"})
        built = sum(start["seconds"].values()) - start["seconds"]["warm_up"]
        assert 0 < built <= engine["build_seconds"]
        assert 0 < start["seconds"]["warm_up"] <= engine["warmup_seconds"]
        assert start["programs"] > 0
        assert start["jax_seconds"].keys() == {"trace", "lower", "compile"}
        assert start["jax_seconds"]["compile"] > 0
    of_engines = sum(e["build_seconds"] + e["warmup_seconds"] for e in stats["engines"])
    assert stats["start"]["seconds"]["engines"] >= of_engines


def test_events(model_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """Each stage of an engine is an event when it begins. The event that an engine serves has
    the figures. Afterwards nobody listens to JAX's events."""
    listeners = list(monitoring.get_event_duration_listeners())
    caplog.set_level(logging.INFO, logger="enginepool")
    with EnginePool(str(model_dir("qwen3")), devices=1, **SMALL) as pool:
        start = pool.stats()["engines"][0]["start"]
        assert list(monitoring.get_event_duration_listeners()) == listeners
    events: list[Any] = caplog.records
    begun = [event.stage for event in events if event.msg == "enginepool.stage_begun"]
    assert begun == ["import", "build", "read_weights", "check", "warm_up"]
    (started,) = [event for event in events if event.msg == "enginepool.engine_started"]
    assert {name: getattr(started, name) for name in start} == start
