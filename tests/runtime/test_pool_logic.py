"""The pool's logic, one move at a time: every request is in one place and ends once.

Queue, queue limit, routing, channel, worker and recovery are the real ones, in a real `Runtime`.
Each worker runs its own loop on its own thread. Only the engines are scripted. One thread runs at a
time: an engine's thread waits wherever another thread could run, and goes on when the test says so.
So Hypothesis chooses the order in which engines, callers and the watchdog make their moves.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from enginepool.config import PoolConfig
from enginepool.dispatch.condition import EngineCondition, EngineState
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.routing import MIN_SHARED_PREFIX
from enginepool.engine.build import Assembly
from enginepool.engine.gil_limiter import Limiter
from enginepool.engine.start_stages import StartStages
from enginepool.engine.worker import EngineWorker
from enginepool.errors import PoolFailed, QueueFull, StepTimeout
from enginepool.runtime.quiesce import EngineGroup, _unfinished
from enginepool.runtime.runtime import Runtime
from enginepool.weights.leaves import EngineLeaves
from tests.support.liveness import until

ROOM = 3
LIVENESS = 60.0  # seconds
# A step succeeds, or it fails: before it has sampled, when it has sampled for some, when it has
# for all, or when it has handed over some.
FAULTS = ["before", "half", "after", "delivering"]
OUTCOMES = ["ok", "ok", "ok", *FAULTS]


class Fault(RuntimeError):
    """The exception that scripted engines raise."""


class Baton:
    """Lets one thread run at a time: an engine's, or the test's."""

    def __init__(self) -> None:
        self._forth, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def let_go_on(self) -> None:
        """Let the engine's thread run until it waits or ends."""
        self._forth.release()
        assert self._back.acquire(timeout=LIVENESS), "the engine's thread neither waits nor ends"

    def wait(self) -> None:
        """Called on the engine's thread."""
        self._back.release()
        self._forth.acquire()

    def end(self) -> None:
        """Called on the engine's thread, at its end."""
        self._back.release()


class Bell(threading.Event):
    """The event that wakes an idle engine, which sleeps by waiting for the test."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self.slept_on = False

    def wait(self, timeout: float | None = None) -> bool:
        self.slept_on = True
        while not self.is_set():
            self._baton.wait()
        self.slept_on = False
        return True


class Stopping(threading.Event):
    """A failed engine waits here before it is reset or rebuilt, as long as the test wants."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._baton.wait()
        return self.is_set()


class Req:
    """Replaces upstream's request."""

    def __init__(self, request: Request) -> None:
        self.rid = request.internal_rid
        self.output_ids = list(request.output_ids)
        self.output_token_logprobs_val = [-float(i) for i in request.output_ids]
        self.grammar = None
        self.cached_tokens = 0
        self.stream = request.stream
        self.aborted = False
        self.finished_reason: Any = None
        self.script: list[int] = request.sampling.script
        self.poison: bool = request.sampling.poison

    def finished(self) -> bool:
        return self.finished_reason is not None

    def sample(self) -> None:
        """Append the next token of the request's script, or end it."""
        if self.aborted:
            self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "abort"})
            return
        token = self.script[len(self.output_ids)]
        self.output_ids.append(token)
        self.output_token_logprobs_val.append(-float(token))
        if len(self.output_ids) == len(self.script):
            self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})


class Leaves(dict[str, Any]):
    """Weights that are never lost."""

    specs: dict[str, Any] = {}  # noqa: RUF012
    shared: frozenset[str] = frozenset()

    def lost(self) -> list[str]:
        return []

    lost_by_owner = lost

    def replace(self, arrays: Any, shared: Any = ()) -> None:
        self.update(arrays)


class ScriptedScheduler:
    """Replaces upstream's scheduler. Its samples are known beforehand."""

    def __init__(self, worker: "ScriptedWorker", queue: RequestQueue) -> None:
        self.index, self.running, self.queue = worker.index, worker.channel.running, queue
        self.worker = worker
        self.reqs: dict[str, Req] = {}
        self.prefixes: set[Any] = set()
        self.leaves = Leaves(a=1)
        self.kv_cache = SimpleNamespace(rebuild=lambda: 0)

    def event_loop_normal(self) -> None:
        while True:
            self.worker.channel.recv_requests()
            self.worker.baton.wait()  # in the step
            self.step(self.worker.outcome)
            self.worker.baton.wait()  # its outputs are there, but it has not returned

    def has_work(self) -> bool:
        return bool(self.reqs)

    def has_scores(self) -> bool:
        """No request asks for scores."""
        return False

    def check_weights(self) -> None:
        """Weights are there, because `disturb` itself unloads engines."""

    def room(self, load: int) -> int:
        return ROOM - load

    def prefilling(self) -> bool:
        """A step prefills all prompts."""
        return False

    def may_start(self) -> Callable[[Request], bool]:
        return lambda _: True

    def cached_prefix(self, request: Request) -> int:
        return MIN_SHARED_PREFIX if request.candidate.prefix in self.prefixes else 0

    def admit(self, request: Request) -> Req:
        assert request.pinned_to in (None, self.index)
        if request.pinned_to is None and self.index in request.faults.reasons:
            # It failed here before, so it has failed on all engines.
            assert request.faults.reasons.keys() >= self.queue._engines.keys()
        self.prefixes.add(request.candidate.prefix)
        self.reqs[request.internal_rid] = Req(request)
        return self.reqs[request.internal_rid]

    def abort(self, rid: str) -> None:
        if rid in self.reqs:
            self.reqs[rid].aborted = True

    def release_all(self) -> None:
        self.reqs, self.prefixes = {}, set()

    reset = release_all

    def step(self, outcome: str) -> None:
        """Sample a token for each request and hand over, or fail in between."""
        batch = list(self.reqs.values())
        if any(req.poison for req in batch) and outcome not in ("before", "half"):
            outcome = "before"
        if outcome == "before":
            raise Fault("no device")
        for number, req in enumerate(batch):
            if outcome == "half" and (req.poison or number == len(batch) // 2):
                req.output_ids.append(-1)  # its log-probability is missing
                raise Fault("half a step")
            req.sample()
        if outcome == "after":
            raise Fault("no result")
        with self.running.lock:
            for req in batch:
                request = self.running.held.get(req.rid)
                if request is None:
                    continue
                if req.finished():
                    del self.reqs[req.rid]
                    self.running.deliver(request, req)
                elif req.stream:
                    self.running.publish(request)
                if outcome == "delivering":
                    raise Fault("no delivery")


class ScriptedAssembly(Assembly):
    """Makes scripted engines, and fails as often as it is told."""

    def __init__(self, worker: "ScriptedWorker", queue: RequestQueue) -> None:
        super().__init__({}, (), worker.channel, StartStages())
        self._make: Callable[[], Any] = lambda: ScriptedScheduler(worker, queue)
        self.failures = 0

    def build(self, source: EngineLeaves | None = None) -> None:
        engine: Any = SimpleNamespace(scheduler_info={"scheduler": self._make()})
        self.engine = engine
        self.leaves = self.scheduler.leaves
        self._channel.attach(self.scheduler)

    def warm_up(self, *, compile_programs: bool) -> None:
        """Nothing needs to be compiled."""

    def reset(self) -> None:
        self._fail()
        super().reset()

    def rebuild(self, *, dummy_weights: bool) -> None:
        self._fail()
        self.build()

    def take_apart(self) -> None:
        self.engine = None

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Fault("no new engine")


class ScriptedWorker(EngineWorker):
    """A worker whose thread makes a `move` on request: it runs to the next place where another
    thread could run. These places are the beginning of a step, inside a step, after it, when it
    is idle, and before a failed engine is reset or rebuilt."""

    def __init__(self, index: int, runtime: Runtime) -> None:
        super().__init__(
            index,
            jax.local_devices()[:1],
            {},
            runtime.dispatch.queue,
            runtime.cache,
            name="scripted",
            recovery=runtime.recovery,
            max_decode_steps=1,
            adapters=runtime.adapters,
        )
        self.baton, self.outcome = Baton(), "ok"
        self.bell = self.channel._wake = Bell(self.baton)
        self.stopping = Stopping(self.baton)
        self.channel.limiter = Limiter(sys.maxsize, LIVENESS)  # no step is overdue
        self.assembly: Any = ScriptedAssembly(self, runtime.dispatch.queue)
        # By request: the number of failures without a token in between, and how many tokens it had.
        self.strikes: dict[str, tuple[int, int]] = {}
        self.gone = False
        self._moving = False
        self.warm_up(compile_programs=False)
        self.start()
        assert self.baton._back.acquire(timeout=LIVENESS)

    def _main(self) -> None:
        try:
            super()._main()
        finally:
            self.gone = True
            self.baton.end()

    @property
    def in_step(self) -> bool:
        return self.condition.stepping_since is not None

    def move(self, outcome: str, failures: int = 0) -> bool:
        """Returns whether there was anything to do."""
        if self.gone or self._moving or (self.bell.slept_on and not self.bell.is_set()):
            return False
        self._moving = True
        try:
            self.outcome, self.assembly.failures = outcome, failures
            self.baton.let_go_on()
        finally:
            self._moving = False
        return True

    def _quarantine(self, error: BaseException, trace: str) -> None:
        assert isinstance(error, Fault | StepTimeout), trace
        self.strike()
        super()._quarantine(error, trace)

    def strike(self) -> None:
        """Count this failure for every request that is present."""
        for request in self.channel.running.held.values():
            count, before = self.strikes.get(request.internal_rid, (0, -1))
            tokens = len(request.req.output_token_logprobs_val)
            self.strikes[request.internal_rid] = (count + 1 if tokens == before else 1, tokens)


def innocent_suspect(worker: ScriptedWorker) -> bool:
    """A request that is not poison runs alone. A third fault must not hit it by chance."""
    return any(
        r.faults.runs_alone and not r.sampling.poison for r in worker.channel.running.held.values()
    )


class PoolLogic(RuleBasedStateMachine):
    """Calls come and go while engines work, fail, hang and come back."""

    @initialize(
        engines=st.integers(1, 4),
        restart=st.sampled_from([True] * 4 + [False]),
        max_restarts=st.sampled_from([0, 1, 1000, 1000]),
        max_queued=st.sampled_from([None, 1, 2, 4]),
        when_full=st.sampled_from(["block", "block", "raise"]),
        closes=st.booleans(),
    )
    def open(
        self,
        engines: int,
        restart: bool,
        max_restarts: int,
        max_queued: int | None,
        when_full: Any,
        closes: bool,
    ) -> None:
        config = PoolConfig(
            "scripted",
            restart=restart,
            max_restarts=max_restarts,
            max_queued=max_queued,
            when_full=when_full,
        )
        self.runtime = Runtime(config, "scripted")
        self.dispatch = self.runtime.dispatch
        self.workers = [ScriptedWorker(i, self.runtime) for i in range(engines)]
        for worker in self.workers:
            worker.strikes = self.workers[0].strikes
        self.runtime.add_engines(self.workers)
        self.let_in = self.dispatch.queue.on_taken
        self.dispatch.queue.on_taken = self.on_taken
        self.on_the_way: list[Request] = []  # cancelled when requests next leave the queue
        self.closes = closes
        self.calls: list[Call] = []
        self.tokens: dict[str, int] = {}  # how many tokens a request is known to have
        self.ended: dict[str, Any] = {}

    # What callers do

    @rule(
        count=st.integers(1, 6),
        poison=st.sampled_from([None, None, 0, 2]),
        length=st.integers(1, 4),
        pinned=st.sampled_from([None, None, None, 0, 1]),
        shared=st.booleans(),
        stream=st.booleans(),
    )
    def call(
        self,
        count: int,
        poison: int | None,
        length: int,
        pinned: int | None,
        shared: bool,
        stream: bool,
    ) -> None:
        call = Call()
        if pinned is not None:
            pinned %= len(self.workers)
        prompt = [5] * (MIN_SHARED_PREFIX + 1) if shared else [5]
        for position in range(count):
            start = 1000 * (len(self.calls) + 1) + 10 * position
            script = SimpleNamespace(
                script=list(range(start, start + length)), poison=position == poison
            )
            call.add(Request(call, prompt, script, stream=stream, pinned_to=pinned))
        behind = len(self.dispatch.queue_limit)
        try:
            self.dispatch.submit(call)
        except QueueFull:
            assert self.runtime.config.when_full == "raise"
            assert len(self.dispatch.queue) + count > self.runtime.config.max_queued
            self.nowhere(call)
        except PoolFailed:
            assert not self.served(pinned)
            self.nowhere(call)
        else:
            self.calls.append(call)
            if behind and not call.done:  # earlier calls go first
                assert call in self.dispatch.queue_limit._outside

    @rule(
        which=st.integers(0, 100),
        every=st.booleans(),
        racing=st.sampled_from([None, None, 0, 1, 2]),
        later=st.booleans(),
        outcome=st.sampled_from(OUTCOMES),
    )
    def cancel(
        self, which: int, every: bool, racing: int | None, later: bool, outcome: str
    ) -> None:
        """A caller leaves, or a timeout ends its requests: perhaps just when an engine makes a
        move, or when an engine has taken requests from the queue and does not hold them yet."""
        calls = [call for call in self.calls if not call.done]
        if not calls:
            return
        requests = calls[which % len(calls)].requests
        group = requests if every else requests[which % len(requests) :][:1]
        if later:
            self.on_the_way = group
            return
        held = [r for worker in self.workers for r in worker.channel.running.held.values()]
        discard = self.dispatch.queue.discard

        def interrupted(request: Request) -> bool:
            found = discard(request)
            if racing is not None:
                self.move(racing, outcome, 0)
                self.move(racing, "ok", 0)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.dispatch.queue, "discard", interrupted)
            self.dispatch.abort(group, "the caller left", "cancelled")
        if racing is None:  # a request that no engine has ends at once
            assert all(r in held or r.finish_reason is not None for r in group)

    def on_taken(self) -> None:
        self.let_in()
        group, self.on_the_way = self.on_the_way, []
        self.dispatch.abort(group, "the caller left", "cancelled")

    # What engines do

    @rule(engine=st.integers(0, 3), outcome=st.sampled_from(OUTCOMES), failures=st.integers(0, 2))
    def move(self, engine: int, outcome: str, failures: int) -> None:
        worker = self.workers[engine % len(self.workers)]
        worker.move("ok" if innocent_suspect(worker) else outcome, failures)

    @rule(engine=st.integers(0, 3))
    def serve(self, engine: int) -> None:
        """Three moves in a row, so that requests make progress."""
        for _ in range(3):
            self.move(engine, "ok", 0)

    @rule(
        engine=st.integers(0, 3),
        what=st.sampled_from(["hang", "retract", "lose weights", "get weights", "get weights"]),
    )
    def disturb(self, engine: int, what: str) -> None:
        """The watchdog finds a step that does not return. Or requests are retracted at a step
        boundary, as by a pause, a flush or a swap. Or weights are deleted and put back."""
        worker = self.workers[engine % len(self.workers)]
        since = worker.condition.stepping_since
        if since is not None:
            if what == "hang" and not innocent_suspect(worker):
                worker.strike()
                self.runtime.recovery.engine_stuck(worker, since, "it does not return")
        elif not worker.condition.reachable:
            return
        elif what == "retract":
            self.dispatch.resume(worker.channel.retract())
        elif what == "lose weights" and worker.condition.serving:
            worker.unload("their owner deleted them")
        elif what == "get weights":
            worker.load()

    # What holds at any time

    def requests(self) -> list[Request]:
        return [request for call in self.calls for request in call.requests]

    def served(self, pinned: int | None) -> bool:
        """Whether an engine serves, or will serve, that may run such a request."""
        workers = self.workers if pinned is None else [self.workers[pinned]]
        return any(worker.condition.will_serve for worker in workers)

    def places(self, request: Request) -> list[str]:
        found = [
            "queue" for group in self.dispatch.queue._groups() if request.internal_rid in group
        ]
        if request.finish_reason is not None:
            found.append("ended")
        elif request.call in self.dispatch.queue_limit._outside:
            found.append("in front of the queue")
        for worker in self.workers:
            if request.internal_rid in worker.channel.running.held:
                found.append(f"engine {worker.index}")
        return found

    def nowhere(self, call: Call) -> None:
        """A refused call has left nothing."""
        assert [self.places(request) for request in call.requests] == [[]] * len(call.requests)
        assert call not in self.dispatch._calls

    @invariant()
    def one_place(self) -> None:
        """In the queue, in front of it, on one engine, or ended."""
        for request in self.requests():
            assert len(self.places(request)) == 1, self.places(request)

    @invariant()
    def one_end(self) -> None:
        for request in self.requests():
            if request.internal_rid in self.ended:
                assert request.finish_reason is self.ended[request.internal_rid]
            elif request.finish_reason is not None:
                self.ended[request.internal_rid] = request.finish_reason
                self.check_end(request)
        counts = self.dispatch.counts
        assert counts.finished + counts.aborted == len(self.ended)
        assert len(self.ended) == sum(len(call.finished) for call in self.calls)
        unfinished = {call for call in self.calls if not call.done}
        assert self.dispatch._calls == unfinished

    def check_end(self, request: Request) -> None:
        reason, poison = request.finish_reason or {}, request.sampling.poison
        ended = reason.get("err_type", reason["type"])
        if ended == "length":
            assert not poison
            assert request.output_ids == request.sampling.script
        elif ended == "poisoned":
            assert poison
            assert self.workers[0].strikes[request.internal_rid][0] == 3
            assert all(why in reason["message"] for why in request.faults.reasons.values())
        elif ended == "engine_failed":
            assert request.pinned_to is not None
            assert not self.runtime.config.restart
        elif ended in ("PoolFailed", "NoWeights"):
            assert not self.served(request.pinned_to)
            assert request.call.failure is not None
            assert self.runtime.config.restart or not (
                request.pinned_to is not None and request.faults.count
            )
            states = [w for w in self.workers if request.pinned_to in (None, w.index)]
            assert all(str(w.condition.reason) in reason["message"] for w in states)
        else:
            assert ended == "cancelled"
            assert request.abort_reason is not None

    @invariant()
    def tokens_only_grow(self) -> None:
        """A request's tokens are the beginning of its script, also while an engine has it, and
        never become fewer. The same holds for the reader of a stream."""
        for request in self.requests():
            script = request.sampling.script
            assert request.output_ids == script[: len(request.output_ids)]
            assert request.logprobs == [-float(token) for token in request.output_ids]
            assert sum(b - a for a, b, _ in request.weight_versions) == len(request.output_ids)
            if request.snapshot is not None:
                assert request.snapshot[0] == script[: len(request.snapshot[0])]
                assert len(request.snapshot[0]) <= len(request.output_ids)
            known = len(request.output_ids)
            if request.req is not None:
                known = max(known, len(request.req.output_token_logprobs_val))
            assert known >= self.tokens.get(request.internal_rid, 0)
            self.tokens[request.internal_rid] = known

    @invariant()
    def room(self) -> None:
        """No engine has more than it can run, and a suspect is alone. The queue knows exactly the
        serving engines. An engine knows its cancelled requests, or will at its next boundary."""
        serving = {worker.index for worker in self.workers if worker.condition.serving}
        assert self.dispatch.queue._engines.keys() == serving
        for worker in self.workers:
            held = list(worker.channel.running.held.values())
            assert len(held) <= ROOM
            assert len(held) <= 1 or not any(request.faults.runs_alone for request in held)
            if worker.in_step:
                assert {r.internal_rid for r in held} == worker.assembly.scheduler.reqs.keys()
            if not worker.condition.reachable:
                assert not held
            heard = all(r.req.aborted for r in held if r.abort_reason is not None)
            assert heard or worker.channel.has_jobs()

    @invariant()
    def suspects(self) -> None:
        """A request is a suspect after two failures without a token in between. An engine that
        is being emptied for one serves, and the suspect waits."""
        for request in self.requests():
            strikes, _ = self.workers[0].strikes.get(request.internal_rid, (0, 0))
            assert request.faults.runs_alone == (strikes >= 2) or request.finish_reason is not None
        queue = self.dispatch.queue
        assert queue._reserved.keys() <= queue._alone.keys()
        assert set(queue._reserved.values()) <= queue._engines.keys()

    @invariant()
    def queue_length(self) -> None:
        """At most `max_queued`, not counting requests that ran before, and except for a single
        call that is larger. Nothing waits in front of an empty queue."""
        queue, limit = self.dispatch.queue, self.runtime.config.max_queued
        new = [r for group in queue._groups() for r in group.values() if not r.retracted]
        if limit is not None and len(new) > limit:
            assert len({request.call for request in new}) == 1
            assert len(new[0].call.requests) > limit
        assert len(queue) or not len(self.dispatch.queue_limit)
        if limit is None or self.runtime.config.when_full == "raise":
            assert not len(self.dispatch.queue_limit)

    # How it ends

    def teardown(self) -> None:
        if not hasattr(self, "runtime"):
            return
        try:
            if self.closes:
                self.close()
            else:
                self.run_out()
        finally:
            self.runtime.close(timeout=0.0)
            self.leave()

    def leave(self) -> None:
        for worker in self.workers:
            while worker.move("ok"):
                pass
            assert worker.gone
            worker.join(None)

    def run_out(self) -> None:
        """With no other disturbance than poison the engines become idle and all requests have
        ended. A request that is no poison and was not cancelled has all its tokens, or no engine
        was left."""
        self.on_the_way = []
        for _ in range(1000):
            moved = [worker.move("ok") for worker in self.workers]
            if not any(moved):
                break
            self.check()
        else:
            pytest.fail("the engines do not come to rest")
        assert {request.internal_rid for request in self.requests()} == self.ended.keys()
        assert len(self.dispatch.queue) == len(self.dispatch.queue_limit) == 0

    def check(self) -> None:
        self.one_place()
        self.one_end()
        self.tokens_only_grow()
        self.room()
        self.suspects()
        self.queue_length()

    def close(self) -> None:
        """Every waiting caller gets PoolClosed at once. Later moves of engines change nothing,
        and all of them end."""
        waited = [request for request in self.requests() if request.finish_reason is None]
        gone = [worker for worker in self.workers if worker.gone]
        for worker in gone:
            worker.join(None)
        assert self.runtime.close(timeout=0.0) == (gone == self.workers)
        reasons = {request.internal_rid: request.finish_reason for request in self.requests()}
        for request in waited:
            assert reasons[request.internal_rid]["err_type"] == "PoolClosed"
            assert type(request.call.failure).__name__ == "PoolClosed"
        self.leave()
        for worker in self.workers:
            assert worker.condition.state in (EngineState.CLOSED, EngineState.QUARANTINED)
        assert self.runtime.close(timeout=0.0)
        assert {r.internal_rid: r.finish_reason for r in self.requests()} == reasons
        self.tokens_only_grow()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Do not report thousands of warnings."""
    caplog.set_level(logging.CRITICAL, "enginepool")


TestPoolLogic = pytest.mark.timeout(900)(PoolLogic.TestCase)  # if it fails, shrinking takes long
TestPoolLogic.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
)


def suspect(pinned_to: int | None = None) -> Request:
    call = Call()
    call.add(Request(call, [5], None, pinned_to=pinned_to))
    call.requests[0].faults.runs_alone = True
    return call.requests[0]


def take(queue: RequestQueue, engine: int, load: int) -> list[Request]:
    return queue.take(engine, load=load, room=ROOM, cached=lambda request: 0)


def test_a_suspect_goes_to_another_engine_if_the_reserved_one_leaves() -> None:
    """The reservation ends with the engine."""
    queue, request = RequestQueue(), suspect()
    for engine in (0, 1):
        queue.attach(engine, EngineCondition(), lambda: 0, lambda: None)
    queue.put([request])
    assert take(queue, 0, load=1) == []
    assert take(queue, 1, load=0) == []
    queue.detach(0)
    assert take(queue, 1, load=0) == [request]


def test_a_suspect_goes_to_another_engine_if_the_reserved_one_is_paused() -> None:
    """The pause of one engine ends its reservation, and wakes the others."""
    runtime = Runtime(PoolConfig(model="scripted"), "scripted")
    queue, request, woken = runtime.dispatch.queue, suspect(), list[int]()
    workers = [ScriptedWorker(index, runtime) for index in (0, 1)]
    for index in (0, 1):
        queue.attach(index, EngineCondition(), lambda: 0, partial(woken.append, index))
    queue.put([request])
    assert take(queue, 0, load=1) == []
    woken.clear()
    workers[0].pause("paused")
    assert 1 in woken
    assert take(queue, 1, load=0) == [request]


def test_suspect_that_only_one_engine_may_run_is_taken_out_with_it() -> None:
    """Like any other pinned request."""
    queue, pinned, free = RequestQueue(), suspect(pinned_to=0), suspect()
    queue.put([pinned, free])
    assert queue.take_pinned_to(0) == [pinned]
    assert len(queue) == 1


@contextmanager
def two_workers() -> Iterator[tuple[Runtime, ScriptedWorker]]:
    """Two engines. The first one is idle, and the second one does nothing."""
    runtime = Runtime(PoolConfig("scripted"), "scripted")
    workers = [ScriptedWorker(index, runtime) for index in (0, 1)]
    runtime.add_engines(workers)
    workers[0].move("ok")
    try:
        yield runtime, workers[0]
    finally:
        runtime.close(timeout=0.0)
        for worker in workers:
            while worker.move("ok"):
                pass


def submit(runtime: Runtime, output_ids: list[int]) -> Request:
    call, logprobs = Call(), [-float(token) for token in output_ids]
    script: Any = SimpleNamespace(script=[1, 2, 3], poison=False)
    call.add(Request(call, [5], script, output_ids=output_ids, logprobs=logprobs))
    runtime.dispatch.submit(call)
    return call.requests[0]


def meanwhile(queue: RequestQueue, what: Callable[[], Any]) -> list[Any]:
    """Another thread does this when a request next leaves the queue, before the engine holds it.
    Returns a list that gets the result."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(what()))

    def on_taken() -> None:
        if not thread.ident:
            thread.start()
            thread.join(1.0)  # it may have to wait for the engine

    queue.on_taken = on_taken
    return done


def test_a_step_that_is_abandoned_while_it_takes_requests() -> None:
    """They go back to the queue, with the others of the engine."""
    with two_workers() as (runtime, worker):
        queue, requests = runtime.dispatch.queue, [submit(runtime, [])]
        worker.move("ok")
        requests += [submit(runtime, []) for _ in range(3)]  # one or two for each engine
        since = worker.condition.stepping_since
        assert since is not None
        stuck = runtime.recovery.engine_stuck
        done = meanwhile(queue, lambda: stuck(worker, since, "it does not return"))
        worker.assembly.scheduler.step = lambda outcome: worker.channel.pull()
        worker.move("ok")
        until(lambda: done)
        assert {key for group in queue._groups() for key in group} == {
            request.internal_rid for request in requests
        }
        assert not worker.channel.running


def test_a_drain_that_looks_while_an_engine_takes_a_request() -> None:
    """The request has not finished."""
    with two_workers() as (runtime, worker):
        engines = EngineGroup(runtime, [worker])
        seen = meanwhile(runtime.dispatch.queue, lambda: _unfinished(engines))
        submit(runtime, [1])
        worker.move("ok")
        until(lambda: seen)
        assert seen == [True]
