"""Whatever breaks in an engine, every prompt is answered as without the fault, and the engine
comes back by a reset, or by a rebuild if a reset does not help."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from enginepool import EnginePool, WeightUpdateFailed
from enginepool.engine.build import Assembly
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, running, until
from tests.support.marks import slow
from tests.support.pools import SMALL, same

PROMPTS = [[65 + i, 90 - i, 40 + i, *range(50, 50 + 3 * i)] for i in range(12)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Three engines with unlimited restarts."""
    path = str(model_dir("qwen3"))
    with EnginePool(path, devices=3, max_restarts=1000, step_timeout=3.0, **SMALL) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(pool: EnginePool) -> list[dict[str, Any]]:
    """The results of the prompts without a fault."""
    # These start the threads of the engines' own calls, and of grammars.
    pool.engines[0].generate(input_ids=PROMPTS[0])
    pool.generate(input_ids=PROMPTS[0], sampling_params={"regex": "[a-f]"})
    return ask(pool)


@pytest.fixture(autouse=True)
def recovers(pool: EnginePool, expected: list[dict[str, Any]]) -> Iterator[None]:
    """After every fault all engines serve with the same weights and give the same results. No
    request slot, KV page or thread is left over."""
    before, checksum = threads(), pool.checksum()
    yield
    until(lambda: states(pool) == ["serving"] * 3)
    assert pool.checksum() == checksum
    for engine in pool.engines:
        result = engine.generate(input_ids=PROMPTS[:4], sampling_params=GREEDY, return_logprob=True)
        same(result, expected[:4])
    until(lambda: at_rest(pool))
    until(lambda: threads() <= before)  # an idle thread of the event loop may have ended meanwhile


def threads() -> set[str]:
    """The threads, without those that anyio keeps for a while."""
    return {t.name for t in threading.enumerate() if not t.name.startswith("AnyIO worker")}


def ask(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)


def ask_until_recovered(pool: EnginePool, before: int, expected: list[dict[str, Any]]) -> None:
    """Until an engine has come back, because the one that is to fail may have had no request at
    first."""
    same(ask(pool), expected)
    while not news(pool, before, "engine_quarantined"):
        same(ask(pool), expected)
    until(lambda: news(pool, before, "engine_recovered"))


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def news(pool: EnginePool, before: int, event: str) -> list[dict[str, Any]]:
    """The events of one kind after the first `before`."""
    return [entry for entry in pool.events()[before:] if entry["event"] == event]


@pytest.mark.parametrize("at", [2, *slow(1, 9)])
@pytest.mark.parametrize(
    "fault", [faults.raise_in_step, faults.raise_after_step, faults.raise_after_bookkeeping]
)
def test_failed_step(
    pool: EnginePool, expected: list[dict[str, Any]], fault: Callable[..., None], at: int
) -> None:
    """In the first prefill, in the next step or later, before or after its result. The engine is
    reset, keeps its programs and its Engine object, and two events report it."""
    before, engine = len(pool.events()), pool.engines[1]
    fault(pool, 1, at)
    ask_until_recovered(pool, before, expected)
    (quarantined,) = news(pool, before, "engine_quarantined")
    (recovered,) = news(pool, before, "engine_recovered")
    assert quarantined["engine"] == recovered["engine"] == 1
    assert quarantined["reason"].startswith("Fault: ")
    assert recovered["by"] == "reset"
    assert pool.engines[1] is engine


@pytest.mark.parametrize("at", [3, *slow(1, 12)])
@pytest.mark.parametrize("fault", [faults.raise_in_step, faults.raise_after_bookkeeping])
def test_grammars_survive_a_failed_step(
    pool: EnginePool, fault: Callable[..., None], at: int
) -> None:
    """A grammar's state is computed again from the request's tokens."""
    params = {
        "temperature": 1.0,
        "sampling_seed": 2,
        "regex": "([a-f]{3}-){6}",
        "max_new_tokens": 40,
    }

    def ask() -> list[dict[str, Any]]:
        return pool.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)

    expected, before = ask(), len(pool.events())
    fault(pool, 1, at)
    same(ask(), expected)
    until(lambda: news(pool, before, "engine_recovered"))
    assert all(len(result["output_ids"]) == 25 for result in expected)


def test_where_a_step_failed_can_be_read(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """The event has the tracebacks of the error and of its cause."""
    before = len(pool.events())
    error = faults.Fault("the second")
    error.__cause__ = ZeroDivisionError("the first")
    faults.raise_in_step(pool, 1, error=error)
    ask_until_recovered(pool, before, expected)
    (quarantined,) = news(pool, before, "engine_quarantined")
    trace = quarantined["exception"]
    assert trace.startswith("ZeroDivisionError: the first")
    assert "in raise_in_step" in trace or "in wrong" in trace
    assert trace.rstrip().endswith("Fault: the second")
    assert error.__traceback__ is None  # its frames hold buffers


def test_a_call_finds_an_engine_that_just_came_back(model_dir: Callable[[str], Path]) -> None:
    """The only engine fails and comes back all the time. Calls that begin at any moment are
    answered. None gets the error that there is no engine or no weights."""
    over = threading.Event()
    with EnginePool(str(model_dir("qwen3")), devices=1, max_restarts=10**6, **SMALL) as pool:
        dispatch = pool.runtime.dispatch

        def look() -> int:
            refused = 0
            while not over.is_set():
                refused += not dispatch.will_be_served(None)
            return refused

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with callers(2) as executor:
                looking = executor.submit(look)
                try:
                    for _ in range(100):
                        faults.raise_in_step(pool, 0)
                        pool.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})
                finally:
                    over.set()
                assert looking.result(SECONDS) == 0
        finally:
            sys.setswitchinterval(interval)


def test_lost_kv_cache(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """The reset allocates deleted KV buffers again."""
    before = len(pool.events())
    faults.delete_kv_cache(pool, 2)
    ask_until_recovered(pool, before, expected)
    assert [entry["by"] for entry in news(pool, before, "engine_recovered")] == ["reset"]


def test_lost_weight(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """A weight that was deleted, and that nobody shared, is copied from another engine."""
    faults.delete_leaf(pool, 0)
    same(ask(pool), expected)


@pytest.mark.parametrize("fails_once", [False, True])
def test_weights_of_an_engine_that_is_rebuilt(
    pool: EnginePool,
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    fails_once: bool,
) -> None:
    """They are the only ones left, and newer than the checkpoint's. Engines that lost theirs
    copy them during the rebuild. The rebuilt engine keeps them, also if the first attempt fails."""
    pool.update_weights(model_dir("qwen3"))
    rebuild, begun, go_on = Assembly.rebuild, threading.Event(), threading.Event()
    failures = [faults.Fault("no memory")] if fails_once else []

    def late(self: Assembly, *, dummy_weights: bool) -> None:
        if failures:
            self.take_apart()
            raise failures.pop()
        begun.set()
        assert go_on.wait(SECONDS)
        rebuild(self, dummy_weights=dummy_weights)

    monkeypatch.setattr(Assembly, "rebuild", late)
    hangs = [faults.hang_in_reset(pool, index) for index in (0, 2)]
    faults.raise_in_reset(pool, 1)
    with callers(3) as executor:
        try:
            for index in (0, 2, 1):
                if index != 1:
                    faults.delete_leaf(pool, index)
                faults.raise_in_step(pool, index)
                executor.submit(pool.engines[index].generate, input_ids=[65])
                until(lambda i=index: states(pool)[i] in ("resetting", "rebuilding"))
            assert begun.wait(SECONDS)
            for hang in hangs:
                assert hang.begun.wait(SECONDS)
                hang.set()
            until(lambda: "resetting" not in states(pool))
            assert states(pool) == ["serving", "rebuilding", "serving"]
        finally:
            for event in (*hangs, go_on):
                event.set()


def test_weight_that_is_not_finite(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """On one engine only. No output has a number that is not finite. The engine is reset, and
    rebuilt with another engine's weights once its requests had finite numbers elsewhere."""
    before, engine = len(pool.events()), pool.engines[0]
    faults.spoil_leaf(pool, 0)
    while pool.engines[0] is engine:
        same(ask(pool), expected)
    until(lambda: news(pool, before, "engine_recovered")[-1]["by"] == "rebuild")
    kinds = [entry["by"] for entry in news(pool, before, "engine_recovered")]
    assert kinds.count("rebuild") == 1
    assert len(kinds) > 1
    assert "NotFinite" in news(pool, before, "engine_quarantined")[0]["reason"]


def test_two_engines_with_weights_that_are_not_finite(
    pool: EnginePool, expected: list[dict[str, Any]]
) -> None:
    """The third engine has shown that the requests are not at fault, so none ends."""
    engines = pool.engines
    faults.spoil_leaf(pool, 0)
    faults.spoil_leaf(pool, 1)
    while pool.engines[0] is engines[0] or pool.engines[1] is engines[1]:
        same(ask(pool), expected)


def test_failures_in_a_row(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """The third failure without a finished request in between leads to a rebuild. The new Engine
    object works like the old one."""
    before, engine = len(pool.events()), pool.engines[1]

    def always(*_: Any, **__: Any) -> Any:
        raise faults.Fault("again")

    faults.every_step(faults.scheduler_of(pool, 1), lambda _: always)
    while pool.engines[1] is engine:
        same(ask(pool), expected)
    until(lambda: len(news(pool, before, "engine_recovered")) == 3)
    recovered = news(pool, before, "engine_recovered")
    assert [(entry["by"], entry["attempt"]) for entry in recovered] == [
        ("reset", 1),
        ("reset", 2),
        ("rebuild", 3),
    ]


@pytest.mark.slow
def test_rebuilds_do_not_add_up(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """Two rebuilds leave no device memory behind, even before a garbage collection, because
    there may be no room for two weight sets."""

    def device_bytes() -> int:
        return pool.stats()["memory"]["devices"][1]["bytes_in_use"]

    before = device_bytes()
    gc.disable()
    try:
        for _ in range(2):
            engine = pool.engines[1]
            faults.spoil_leaf(pool, 1)
            while pool.engines[1] is engine:
                same(ask(pool), expected)
            until(lambda: states(pool)[1] == "serving")
            # Of a megabyte or more that weights take.
            until(lambda: device_bytes() < before + 10_000)
    finally:
        gc.enable()


def test_step_that_does_not_return(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """The engine is abandoned, `stats` says so, and its requests continue on others. The results
    of the step, when it returns, reach nobody. Then the engine serves again."""
    let_go = faults.hang_in_step(pool, 1, at=3)
    try:
        same(ask(pool), expected)
        assert states(pool)[1] == "abandoned"
        assert "step_timeout=3.0" in pool.stats()["engines"][1]["reason"]
        same(ask(pool), expected)
    finally:
        let_go.set()


def test_missed_swap(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """An engine that was out during an update has the new weights when it comes back."""
    import jax.numpy as jnp

    old = list(faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves)
    let_go = faults.hang_in_step(pool, 1)
    try:
        same(ask(pool), expected)
        report = pool.update_weights([jnp.flip(leaf) for leaf in old], weight_version="flipped")
        assert [engine.engine_index for engine in report.engines] == [0, 2]
    finally:
        let_go.set()
    until(lambda: states(pool) == ["serving"] * 3)
    pool.checksum()
    result = pool.engines[1].generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert result["meta_info"]["weight_version"] == "flipped"
    assert result["output_ids"] != expected[0]["output_ids"]
    pool.update_weights(old)


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_failure_while_a_swap_waits(
    pool: EnginePool,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    mode: Literal["drain", "abort"],
) -> None:
    """The swap waits for the requests of a failing engine, also on their way back to the queue.
    No output mixes versions."""
    import jax.numpy as jnp

    old = list(faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves)
    begun, waiting, updated = threading.Event(), threading.Event(), threading.Event()
    undo: list[Callable[[], None]] = []

    def fail_at_the_fifth_step(engine: int) -> None:
        steps = 0

        def change(forward: Any) -> Any:
            def failing(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps < 5:
                    return forward(*args, **kwargs)
                begun.set()
                assert waiting.wait(SECONDS)
                for put_back in undo:
                    put_back()
                raise faults.Fault("while it waits")

            return failing

        undo.append(faults.every_step(faults.scheduler_of(pool, engine), change))

    dispatch = pool.runtime.dispatch
    resume = dispatch.resume

    def slow(requests: Any) -> None:
        if requests := list(requests):
            updated.wait(1.0)  # times out, unless the update did not wait for these
        resume(requests)

    monkeypatch.setattr(dispatch, "resume", slow)
    for engine in range(3):
        fail_at_the_fifth_step(engine)
    with callers(2) as executor:
        answer = executor.submit(pool.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert begun.wait(SECONDS)
        flipped = [jnp.flip(leaf) for leaf in old]
        update = executor.submit(pool.update_weights, flipped, mode=mode)
        update.add_done_callback(lambda _: updated.set())
        until(lambda: states(pool).count("serving") == 1)  # the others drain, or stand
        waiting.set()
        result = answer.result(SECONDS)
        update.result(SECONDS)
    if mode == "drain":
        assert result["output_ids"] == expected[0]["output_ids"]
    else:
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert result["output_ids"] == expected[0]["output_ids"][:4]
    assert len(result["meta_info"]["weight_versions"]) == 1
    until(lambda: states(pool) == ["serving"] * 3)
    pool.update_weights(old)


def test_another_engine_takes_the_requests_of_one_that_fails_while_draining(
    pool: EnginePool,
) -> None:
    """The other engine was idle and could have been swapped at once. Now the swap waits for it,
    too."""
    import jax.numpy as jnp

    old = list(faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves)
    asked: dict[str, Any] = {
        "input_ids": PROMPTS[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    }
    expected = pool.generate(**asked)
    flipped = [jnp.flip(leaf) for leaf in old]

    def holders() -> list[int]:
        return [index for index, load in enumerate(pool.get_load()) if load["running"]]

    with callers(2) as executor:
        answer = executor.submit(pool.generate, **asked)
        until(holders)
        (holder,) = holders()
        in_step, in_reset = faults.hang_in_step(pool, holder), faults.hang_in_reset(pool, holder)
        try:
            assert in_step.begun.wait(SECONDS)
            update = executor.submit(pool.update_weights, flipped, mode="drain")
            until(lambda: states(pool).count("draining") == 2)
            # In the step after the one that hangs, at whose end this engine drains, too.
            faults.raise_in_step(pool, holder)
            in_step.set()
            until(lambda: holders() not in ([], [holder]))
        finally:
            in_step.set()
            in_reset.set()
        result = answer.result(SECONDS)
        update.result(SECONDS)
    assert result["output_ids"] == expected["output_ids"]
    assert len(result["meta_info"]["weight_versions"]) == 1
    until(lambda: states(pool) == ["serving"] * 3)
    pool.update_weights(old)


def test_call_pinned_to_an_engine(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """A request that only the failed engine may run waits for it, and continues with its tokens."""
    faults.raise_in_step(pool, 2, at=5)
    result = pool.engines[2].generate(
        input_ids=PROMPTS[0], sampling_params=GREEDY, return_logprob=True
    )
    same([result], expected[:1])


def test_stream(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """After a failure in the middle of a stream no token comes twice and none is missing."""
    seen: list[int] = []
    for engine in range(3):
        faults.raise_in_step(pool, engine, at=6)
    for chunk in pool.stream(input_ids=PROMPTS[3], sampling_params=GREEDY):
        ids = chunk["output_ids"]
        assert ids[: len(seen)] == seen
        seen = ids
    assert seen == expected[3]["output_ids"]
    ask(pool)  # the other engines fail here


def test_all_at_once(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """All engines are out for a moment. Requests wait, and no caller gets PoolFailed."""
    for engine in range(3):
        faults.raise_in_step(pool, engine, at=4)
    same(ask(pool), expected)


def test_update_with_all_out(
    pool: EnginePool, expected: list[dict[str, Any]], model_dir: Callable[[str], Path]
) -> None:
    """New weights while all engines are being brought back are refused, and can be tried again.
    The error is not PoolFailed."""
    resets = [faults.hang_in_reset(pool, engine) for engine in range(3)]
    try:
        for engine in range(3):
            # By then every request has new tokens, so that none counts as poison.
            faults.raise_in_step(pool, engine, at=4)
        with callers(1) as executor:
            call = executor.submit(ask, pool)
            until(lambda: states(pool) == ["resetting"] * 3)
            with pytest.raises(WeightUpdateFailed, match="try again"):
                pool.update_weights(model_dir("qwen3"), weight_version=0)
            for let_go in resets:
                let_go.set()
            same(call.result(SECONDS), expected)
    finally:
        for let_go in resets:
            let_go.set()
    pool.update_weights(model_dir("qwen3"), weight_version=0)


def test_poison(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """A request that makes every engine fail runs alone on the third, then ends with all three
    reasons. Requests that shared its batches are answered, and so are later ones."""
    poison = [7] * 9
    for engine in range(3):
        scheduler = faults.scheduler_of(pool, engine)

        def change(forward: Any, s: Any = scheduler) -> Any:
            def failing(*args: Any, **kwargs: Any) -> Any:
                reqs = [req for info in s.cur_batch.reqs_info for req in info.reqs or ()]
                if any(req.origin_input_ids == poison for req in reqs):
                    raise faults.Fault("this was poison")
                return forward(*args, **kwargs)

            return failing

        faults.every_prefill(scheduler, change)
    results = pool.generate_all(
        input_ids=[poison, *PROMPTS], sampling_params=GREEDY, return_logprob=True
    )
    reason = results[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["err_type"]) == ("abort", "poisoned")
    assert all(f"engine {i}: Fault: this was poison" in reason["message"] for i in range(3))
    same(results[1:], expected)


def test_weights_that_are_not_finite(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """On every engine. Outputs end with an error that names the weight version. No engine is
    rebuilt or leaves. The next weights work at once."""
    import jax.numpy as jnp

    before, engines = len(pool.events()), pool.engines
    old = list(faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves)
    pool.update_weights([leaf * jnp.nan for leaf in old], weight_version="broken")
    for _ in range(2):
        for result in ask(pool):
            reason = result["meta_info"]["finish_reason"]
            assert (reason["type"], reason["err_type"]) == ("abort", "not_finite")
            assert "weight version 'broken'" in reason["message"]
            assert result["output_ids"] == []
    pool.update_weights(old)
    same(ask(pool), expected)
    assert {entry["by"] for entry in news(pool, before, "engine_recovered")} == {"reset"}
    assert pool.engines == engines


def test_kv_cache_released_meanwhile(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """An engine that comes back into a pool without KV caches has none either."""
    let_go = faults.hang_in_step(pool, 1)
    same(ask(pool), expected)
    released = pool.release_memory_occupation()
    let_go.set()
    until(lambda: states(pool) == ["paused"] * 3)
    with callers(1) as executor:
        call = executor.submit(ask, pool)
        assert pool.resume_memory_occupation() == released // 2 * 3
        same(call.result(SECONDS), expected)


def test_close_with_a_stuck_step(model_dir: Callable[[str], Path]) -> None:
    """Closing does not wait for a step that does not return. Its caller gets an error."""
    with EnginePool(str(model_dir("qwen3")), devices=1, step_timeout=1.0, **SMALL) as pool:
        pool.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        let_go = faults.hang_in_step(pool, 0)
        with callers(1) as executor, pytest.raises(Exception, match="has not returned") as caught:
            executor.submit(ask, pool).result(SECONDS)
        assert type(caught.value).__name__ == "PoolFailed"
        assert running(pool) == 0
        pool.close()
        name = f"{pool.name}-engine-0"
        assert [t.name for t in threading.enumerate() if t.name.startswith(pool.name)] == [name]
        let_go.set()
        until(lambda: not any(t.name == name for t in threading.enumerate()))


@pytest.mark.slow
def test_limit_of_restarts(model_dir: Callable[[str], Path]) -> None:
    """An engine that keeps failing stays out, and `stats` says why. The other one serves."""
    options = {**SMALL, "max_restarts": 2}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        expected = ask(pool)
        while states(pool)[0] in ("serving", "resetting"):
            scheduler = faults.scheduler_of(pool, 0)

            def always(*_: Any, **__: Any) -> Any:
                raise faults.Fault("again")

            faults.every_prefill(scheduler, lambda _: always)
            same(ask(pool), expected)
            until(lambda: states(pool)[0] in ("serving", "quarantined"))
        reason = pool.stats()["engines"][0]["reason"]
        assert reason.startswith("Fault: again")
        assert "max_restarts=2" in reason
        same(ask(pool), expected)
