"""An engine that fails is quarantined with its reason. Its requests and everything else continue.

Here engines do not come back (`restart=False`). In test_recovery.py they do.

Faults are put into upstream's own objects from outside, as hardware would cause them: the forward
of one engine raises at a given step.
"""

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, PoolFailed
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until, waiting
from tests.support.marks import slow
from tests.support.pools import SMALL, same

PROMPTS = [[65 + i, 90 - i, 40 + i, *range(50, 50 + 3 * i)] for i in range(12)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 7}


class Spare:
    """Pools that may break. One stays open while enough of its engines serve."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._pool: EnginePool | None = None

    def pool(self, engines: int) -> EnginePool:
        """A pool of which at least this many engines serve."""
        if self._pool is None or self._pool.closed or len(serving(self._pool)) < engines:
            self.close()
            self._pool = EnginePool(self._model, devices=4, restart=False, **SMALL).open()
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="module")
def spare(model_dir: Callable[[str], Path]) -> Any:
    spare = Spare(model_dir("qwen3"))
    yield spare
    spare.close()


@pytest.fixture(scope="module")
def expected(pool: EnginePool) -> dict[str, list[dict[str, Any]]]:
    """The results of the prompts without a fault."""
    return {
        name: pool.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


def serving(pool: EnginePool) -> list[int]:
    return [e["engine_index"] for e in pool.stats()["engines"] if e["state"] == "serving"]


class Broken(RuntimeError):
    """The exception that faults raise."""


def break_at(pool: EnginePool, engine: int, step: int, error: BaseException | None = None) -> None:
    """Let an engine's forward raise at step number `step` from now."""
    steps = 0

    def change(forward: Any) -> Any:
        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps >= step:
                raise error or Broken(f"device {engine} is gone")
            return forward(*args, **kwargs)

        return failing

    faults.every_step(faults.scheduler_of(pool, engine), change)


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


@pytest.mark.parametrize(
    ("kind", "step", "error"),
    [
        *slow(("greedy", 1, Broken("gone"))),
        ("sampled", 7, Broken("gone")),
        ("greedy", 9, SystemExit(3)),
    ],
)
def test_fault_in_a_step(
    spare: Spare,
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    step: int,
    error: BaseException,
) -> None:
    """For any exception, at the first step or later, the engine is quarantined, with the reason
    in `stats` and in one warning. Every request of the call gives what it gives without the
    fault. No signal is sent, no handler changes, and later calls go to the other engines."""
    params = {"greedy": GREEDY, "sampled": SAMPLED}[kind]
    pool = spare.pool(2)
    broken = serving(pool)[0]
    before = handlers()
    got_signals: list[int] = []
    old = signal.signal(signal.SIGQUIT, lambda number, _: got_signals.append(number))
    try:
        break_at(pool, broken, step, error)
        with caplog.at_level(logging.WARNING, "enginepool"):
            results = pool.generate_all(
                input_ids=PROMPTS, sampling_params=params, return_logprob=True
            )
    finally:
        signal.signal(signal.SIGQUIT, old)
    same(results, expected[kind])
    assert got_signals == []
    assert handlers() == before
    reason = f"{type(error).__name__}: {error}"
    stats = pool.stats()
    assert (stats["engines"][broken]["state"], stats["engines"][broken]["reason"]) == (
        "quarantined",
        reason,
    )
    (record,) = [r for r in caplog.records if "quarantined" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert broken not in serving(pool)
    assert f"{len(serving(pool))} of 4 engines serving" in repr(pool)
    assert stats["aborted"] == 0
    again = pool.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    same(again, expected[kind])
    assert {r["meta_info"]["engine_index"] for r in again} == set(serving(pool))


def test_memory_of_a_broken_engine(spare: Spare) -> None:
    """A quarantined engine frees its device memory, and its thread ends."""
    pool = spare.pool(2)
    broken = serving(pool)[0]

    def in_use(engine: int) -> int:
        gc.collect()
        return pool.stats()["memory"]["devices"][engine]["bytes_in_use"]

    used = in_use(broken)
    break_at(pool, broken, 1)
    pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY)
    until(lambda: not any(t.name == f"{pool.name}-engine-{broken}" for t in threading.enumerate()))
    # The session's other pool has an engine on the same device.
    assert in_use(broken) <= used - pool_weights(pool)


def pool_weights(pool: EnginePool) -> int:
    import jax
    from flax import nnx

    engine = pool.engines[serving(pool)[0]]
    model = engine.scheduler_info["scheduler"].tp_worker.worker.model_runner.model
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def test_calls_pinned_to_a_broken_engine(spare: Spare, expected: dict[str, Any]) -> None:
    """`generate` of that engine says that it is quarantined and why. A call in flight ends with
    its tokens, and later calls raise. Neither waits for ever."""
    pool = spare.pool(2)
    broken = serving(pool)[0]
    engine = pool.engines[broken]
    break_at(pool, broken, 5)
    with callers(1) as executor:
        call = executor.submit(engine.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
        result = call.result(SECONDS)
        reason = result["meta_info"]["finish_reason"]
        assert (reason["type"], reason["err_type"]) == ("abort", "engine_failed")
        assert f"device {broken} is gone" in reason["message"]
        # The four dispatches that did not fail. The pool chooses how many steps each has.
        ids = result["output_ids"]
        assert 4 <= len(ids) < 40
        assert ids == expected["greedy"][0]["output_ids"][: len(ids)]
        assert pool.engines[broken] is engine
        later = executor.submit(engine.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
        with pytest.raises(PoolFailed) as raised:
            later.result(SECONDS)
        assert re.search(rf"engine {broken} .* quarantined .*is gone", str(raised.value))
        assert type(raised.value) is PoolFailed  # not NoWeights: an update would not help
    assert pool.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]


def test_fault_while_paused_and_queued(spare: Spare, expected: dict[str, Any]) -> None:
    """An engine that fails in the first step after a pause returns its requests, too."""
    pool = spare.pool(2)
    broken = serving(pool)[0]
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True
        )
        until(lambda: running(pool) >= 4)
        with paused(pool):
            assert serving(pool) == []
            break_at(pool, broken, 1)
        same(call.result(SECONDS), expected["greedy"])
    until(lambda: at_rest(pool))


def test_release_that_fails(spare: Spare, expected: dict[str, Any]) -> None:
    """An engine that cannot release its requests for a pause is quarantined. They resume on
    others."""
    pool = spare.pool(2)
    broken = serving(pool)[0]

    def failing() -> None:
        raise Broken("the bookkeeping is wrong")

    pool.engines[broken].scheduler_info["scheduler"].release_all = failing
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True
        )
        until(lambda: running(pool) >= 4)
        pool.flush_cache()
        same(call.result(SECONDS), expected["greedy"])
    until(lambda: broken not in serving(pool))
    assert "the bookkeeping is wrong" in pool.stats()["engines"][broken]["reason"]


def test_poisoned(spare: Spare, expected: dict[str, Any]) -> None:
    """A request that was present in two failures runs alone on a third engine. When this engine
    fails as well, the request ends with all reasons. Requests that shared its batches are
    answered."""
    pool = spare.pool(4)
    poison = [7] * 9

    def fail_on_poison(engine: int) -> None:
        scheduler = faults.scheduler_of(pool, engine)

        def change(forward: Any) -> Any:
            def failing(*args: Any, **kwargs: Any) -> Any:
                reqs = scheduler.cur_batch.reqs_info
                if any(req.origin_input_ids == poison for info in reqs for req in info.reqs or ()):
                    raise Broken(f"engine {engine} was given poison")
                return forward(*args, **kwargs)

            return failing

        faults.every_prefill(scheduler, change)

    for engine in range(4):
        fail_on_poison(engine)
    results = pool.generate_all(
        input_ids=[poison, *PROMPTS], sampling_params=GREEDY, return_logprob=True
    )
    reason = results[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["err_type"]) == ("abort", "poisoned")
    assert reason["message"].count("was given poison") == 3
    assert len(serving(pool)) == 1
    same(results[1:], expected["greedy"])


def test_a_front_end_of_a_pool_whose_first_engine_is_out(spare: Spare) -> None:
    """It has what other code reads, and serves."""
    pool = spare.pool(2)
    if 0 in serving(pool):
        break_at(pool, 0, 1)
        pool.engines[0].generate(input_ids=[65], sampling_params=GREEDY)
    until(lambda: "scheduler" not in pool.engines[0].scheduler_info)
    front = pool.front_end()
    assert front.model_config.context_len == SMALL["context_length"]
    assert front.tokenizer.decode(front.tokenizer.encode("1")) == "1"


def test_all_engines_fail(spare: Spare) -> None:
    """The call raises PoolFailed with every engine's reason and all results in their places. So
    does every later call. Queued calls do not hang, and the pool closes."""
    pool = spare.pool(2)
    for engine in serving(pool):
        break_at(pool, engine, 3)
    with callers(2) as executor:
        with paused(pool):
            calls = [
                executor.submit(pool.generate_all, input_ids=PROMPTS * 4, sampling_params=GREEDY)
                for _ in range(2)
            ]
            until(lambda: waiting(pool) == 8 * len(PROMPTS))
        for call in calls:
            with pytest.raises(PoolFailed, match="no engine left") as caught:
                call.result(SECONDS)
            for engine in range(4):
                assert f"engine {engine}: Broken" in str(caught.value)
            results = caught.value.results
            assert [r["meta_info"]["prompt_index"] for r in results] == [*range(4 * len(PROMPTS))]
            assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"abort"}
    for use in (
        lambda: pool.generate(input_ids=[65]),
        lambda: list(pool.stream(input_ids=[65])),
        lambda: list(pool.as_completed(input_ids=[65])),
    ):
        with pytest.raises(PoolFailed, match="no engine left"):
            use()
    assert "0 of 4 engines serving" in repr(pool)
    assert [e["state"] for e in pool.stats()["engines"]] == ["quarantined"] * 4
    pool.pause_generation()
    pool.flush_cache()
    pool.continue_generation()
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(pool.name)]


def test_keyboard_interrupt(pool: EnginePool, expected: dict[str, Any], control_c: None) -> None:
    """Control-C in a waiting call, in a stream and in a paused pool raises KeyboardInterrupt
    there. It ends the call's requests, and the pool stays usable."""
    long = {**GREEDY, "max_new_tokens": 450}
    aborted = pool.stats()["aborted"]

    def interrupt(when: Callable[[], bool]) -> None:
        until(when)
        os.kill(os.getpid(), signal.SIGINT)

    with callers(1) as executor:
        sent = executor.submit(interrupt, lambda: running(pool) == 12)
        with pytest.raises(KeyboardInterrupt):
            pool.generate_all(input_ids=PROMPTS, sampling_params=long)
        sent.result(SECONDS)
        until(lambda: at_rest(pool))
        with paused(pool):
            sent = executor.submit(interrupt, lambda: waiting(pool) == 1)
            with pytest.raises(KeyboardInterrupt):
                list(pool.stream(input_ids=[65], sampling_params=long))
            sent.result(SECONDS)
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 13
    results = pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    same(results, expected["greedy"])
