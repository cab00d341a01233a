"""Faults of the process around the engines: the tokenizer, threads, signals, `device_put`. The
host program does not notice them, and the pool serves on."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import jax
import pytest

from enginepool import EnginePool, InvalidRequest, RequestsFailed, WeightUpdateFailed
from tests.runtime.test_swap_faults import FOR_EVER, FULL, full
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, idle, running, until
from tests.support.pools import SMALL, same

PROMPTS = [[65 + i, 90 - i, 40 + i, *range(50, 50 + 3 * i)] for i in range(12)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SCRIPT = Path(__file__).parents[1] / "support" / "host_script.py"


@pytest.fixture(scope="module")
def pool(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Three engines with unlimited restarts."""
    with EnginePool(str(model_dir("qwen3")), devices=3, max_restarts=1000, **SMALL) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(pool: EnginePool) -> list[dict[str, Any]]:
    """The results of the prompts without a fault."""
    return ask(pool)


@pytest.fixture(autouse=True)
def serves_on(pool: EnginePool, expected: list[dict[str, Any]]) -> Iterator[None]:
    """After every fault all engines serve as before, and nothing of the fault is left."""
    before, checksum = threads(), pool.checksum()
    yield
    until(lambda: states(pool) == ["serving"] * 3)
    until(lambda: at_rest(pool))
    assert pool.checksum() == checksum
    same(ask(pool), expected)
    until(lambda: threads() <= before)  # idle ones may have ended meanwhile


def threads() -> set[str]:
    """The threads, without those that anyio and trio keep for a while."""
    kept = ("AnyIO worker", "Trio thread")
    return {t.name for t in threading.enumerate() if not t.name.startswith(kept)}


def ask(pool: EnginePool, prompts: list[list[int]] = PROMPTS) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=prompts, sampling_params=GREEDY, return_logprob=True)


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def recoveries(pool: EnginePool, before: int) -> list[tuple[int, str]]:
    """The engines that came back after the first `before` events, and by what action."""
    return [
        (entry["engine"], entry["by"])
        for entry in pool.events()[before:]
        if entry["event"] == "engine_recovered"
    ]


# The tokenizer


def test_text_that_the_tokenizer_does_not_take(pool: EnginePool) -> None:
    """Half a surrogate pair is no text. The error names the prompt, and nothing of the call
    starts."""
    until(lambda: idle(pool))
    before = pool.stats()
    with pytest.raises(InvalidRequest, match=r"tokenizer does not take .*ud800") as caught:
        pool.generate_all(["a", "\ud800", "b"])
    assert caught.value.prompt_index == 1
    assert pool.stats()["engines"] == before["engines"]


def test_tokenizer_that_does_not_encode(pool: EnginePool) -> None:
    """The call raises, nothing of it starts, and a call at the same time is answered."""
    before = len(pool.events())
    with callers(1) as executor:
        other = executor.submit(ask, pool)
        until(lambda: running(pool) > 0)
        with broken_encoder(pool), pytest.raises(InvalidRequest, match="is broken") as caught:
            pool.generate_all(["12+7=", "1+2="], GREEDY)
        assert isinstance(caught.value.__cause__, faults.Fault)
        assert len(other.result(SECONDS)) == len(PROMPTS)
    assert pool.events()[before:] == []


def test_tokenizer_that_does_not_decode(pool: EnginePool) -> None:
    """That output has the error and its ids. The others are as usual, and no engine is affected."""
    expected, before = ask(pool), len(pool.events())
    faults.raise_in_decode(pool)
    first, *others = ask(pool)
    reason = first["meta_info"]["finish_reason"]
    assert (reason["type"], reason["err_type"]) == ("abort", "tokenizer")
    assert "the tokenizer is broken" in reason["message"]
    assert (first["text"], first["output_ids"]) == ("", expected[0]["output_ids"])
    assert [r["text"] for r in others] == [r["text"] for r in expected[1:]]
    assert pool.events()[before:] == []
    faults.raise_in_decode(pool)
    with pytest.raises(RequestsFailed) as caught:
        pool.generate_all(input_ids=PROMPTS[:2], sampling_params=GREEDY, raise_on_error=True)
    assert len(caught.value.results) == 2


@pytest.mark.parametrize("backend", ["sync", "asyncio", "trio"])
def test_tokenizer_that_raises_in_a_stream(pool: EnginePool, backend: str) -> None:
    """The stream raises, and its running requests end."""
    params = {**GREEDY, "max_new_tokens": 400}
    aborted = pool.stats()["aborted"]

    async def asynchronously() -> None:
        chunks = pool.async_stream(input_ids=PROMPTS[:3], sampling_params=params)
        await anext(chunks)
        faults.raise_in_decode(pool)
        async for _ in chunks:
            pass

    def synchronously() -> None:
        chunks = pool.stream(input_ids=PROMPTS[:3], sampling_params=params)
        next(chunks)
        faults.raise_in_decode(pool)
        list(chunks)

    with pytest.raises(faults.Fault):
        synchronously() if backend == "sync" else anyio.run(asynchronously, backend=backend)
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 3


@contextmanager
def broken_encoder(pool: EnginePool) -> Iterator[None]:
    """The Rust part of the tokenizer raises."""
    tokenizer = pool.engines[0].tokenizer_manager.tokenizer

    def encode_batch(*_: Any, **__: Any) -> Any:
        raise faults.Fault("the tokenizer is broken")

    class Broken:
        """Wraps the Rust part."""

        def __init__(self, whole: Any) -> None:
            self._whole = whole
            self.encode_batch = encode_batch

        def __getattr__(self, name: str) -> Any:
            return getattr(self._whole, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_tokenizer", Broken(tokenizer._tokenizer))
        yield


# Threads


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_killed_thread(
    pool: EnginePool, expected: list[dict[str, Any]], error: BaseException
) -> None:
    """Exceptions that end other threads do not end an engine's. The engine is reset and serves
    again on the same thread, and no prompt is lost."""
    before = len(pool.events())
    faults.raise_in_step(pool, 1, at=3, error=error)
    same(ask(pool), expected)
    until(lambda: recoveries(pool, before))
    assert recoveries(pool, before) == [(1, "reset")]
    assert type(error).__name__ in pool.events()[before]["reason"]


# device_put


@contextmanager
def full_while(state: str, pool: EnginePool, engine: int, times: int) -> Iterator[list[str]]:
    """While an engine is in this state, placing arrays on its device fails `times` times."""
    device_put, refused = jax.device_put, []

    def put(array: Any, where: Any = None, *args: Any, **options: Any) -> Any:
        if (
            engine in faults.placed_on(where)
            and states(pool)[engine] == state
            and len(refused) < times
        ):
            refused.append(state)
            raise faults.Fault(f"device {engine} is full")
        return device_put(array, where, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", put)
        yield refused


def test_device_put_in_a_rebuild(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """A rebuild without enough memory is tried again after a pause. The other engines serve
    meanwhile."""
    before, engine = len(pool.events()), pool.engines[0]
    with full_while("rebuilding", pool, 0, times=2) as refused:
        faults.raise_in_reset(pool, 0)
        faults.raise_in_step(pool, 0)
        same(ask(pool), expected)
        until(lambda: recoveries(pool, before))
        assert len(refused) == 2
    (recovered,) = [e for e in pool.events()[before:] if e["event"] == "engine_recovered"]
    # The failed step, the failed reset, two failed rebuilds.
    assert (recovered["by"], recovered["attempt"]) == ("rebuild", 4)
    assert pool.engines[0] is not engine


def test_device_put_in_an_update_under_load(
    pool: EnginePool, expected: list[dict[str, Any]], target: Callable[[str], Path]
) -> None:
    """A device has no memory for new weights, while all engines run and another one fails. Every
    output is complete and of the old weights."""
    before = len(pool.events())
    with callers(1) as executor, full(2, FOR_EVER):
        call = executor.submit(ask, pool, PROMPTS * 4)
        until(lambda: running(pool) == 12)
        faults.raise_in_step(pool, 1)
        with pytest.raises(WeightUpdateFailed, match=FULL) as caught:
            pool.update_weights(target("qwen3"))
        assert caught.value.engine_index == 2
        del caught
        same(call.result(SECONDS), expected * 4)
    until(lambda: recoveries(pool, before))
    assert recoveries(pool, before) == [(1, "reset")]
    assert pool.stats()["weight_version"] == 0


# The host program


class Program:
    """A program of host_script.py that was started."""

    def __init__(self, name: str, model: Path, **options: Any) -> None:
        arguments = [name, model, json.dumps(SMALL | {"warmup": "none"} | options)]
        self.process = subprocess.Popen(
            # -P: otherwise the folder tests/support comes before every package.
            [sys.executable, "-P", SCRIPT, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def report(self) -> dict[str, Any]:
        """Its last output. It must end by itself, without a traceback."""
        try:
            out, err = self.process.communicate(timeout=2 * SECONDS)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, err
        assert "Traceback" not in err, err
        return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_host_program(model_dir: Callable[[str], Path]) -> None:
    """A fault and a rebuild change none of the host's child processes, signal handlers, threads,
    random state, environment, files and exit hooks. No signal is sent."""
    report = Program("host", model_dir("qwen3")).report()
    assert report["recovered"] == ["reset", "rebuild"] * 2
    assert report["differences"] == {}
    assert report["signals"] == []
    assert report["child lives"]


@pytest.mark.slow
def test_control_c(model_dir: Callable[[str], Path]) -> None:
    """Control-C in `generate_all` on the main thread raises KeyboardInterrupt there. No request
    runs on, the pool serves, and after closing the process ends by itself without a thread left."""
    program = Program("interrupted", model_dir("qwen3"))
    assert program.line() == "generating"
    program.process.send_signal(signal.SIGINT)
    assert program.report() == {
        "raised": "KeyboardInterrupt",
        "aborted": 12,
        "states": ["serving", "serving"],
        "kv": [0, 0],
        "length": 24,
        "threads": ["MainThread"],
    }
