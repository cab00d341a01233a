"""The time of an engine's step by section, measured on the engine's own thread.

Methods of one engine's scheduler, worker and model runner are wrapped meanwhile. Names that an
upstream does not have are left out.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from enginepool.dispatch.request import Request
from enginepool.engine.worker import EngineWorker

# The section of each method. A method that another one calls counts for its own section.
_SCHEDULER = {
    "admit": "admission",
    "get_next_batch_to_run": "scheduling",
    "get_new_batch_prefill": "scheduling",
    "run_batch": "batch",
    "process_batch_result": "bookkeeping",
    "stream_output": "output",
}
_PREFIX_CACHE = dict.fromkeys(
    ("match_prefix", "cache_finished_req", "cache_unfinished_req", "evict"), "prefix cache"
)
_ALLOCATOR = dict.fromkeys(("alloc", "alloc_extend", "free"), "KV pages")
_WORKER = {"forward_batch_generation": "transfers"}
_RUNNER = dict.fromkeys(("forward", "sample", "compute_logprobs"), "prefill")
_ADMISSION = {"admit": "join", "read": "join"}
_PREFILL = {"begin": "batch", "read": "batch"}
_PREFILL_STEP = {"send": "transfers", "launch": "prefill"}
# Sections of steady decode.
_DEVICE_WAIT = {"until_ready": "device"}
_STEADY = {"append": "tokens"}
_STEADY_PROGRAM = {"step": "launch", **dict.fromkeys(("begin", "tally"), "join")}
_SENDER = {"batch": "join"}
# Methods that run a step of upstream's or a prefill, and those that run several decode steps.
_SINGLE, _STEPS = ("forward_batch_generation", "launch"), ("step",)
SECTIONS = (
    *("admission", "scheduling", "prefix cache", "KV pages", "batch", "transfers", "prefill"),
    *("bookkeeping", "output", "join", "launch", "device", "tokens"),
)


@dataclass
class StepProfile:
    """The measured steps of an engine.

    Attributes:
        steps: The number of steps.
        prefills: The number of steps that were prefills.
        tokens: The output tokens of its requests.
        waits: For each request, the seconds from when the engine took it to its first token.
        wall: Seconds by section, without the time of inner sections.
        cpu: The thread's processor seconds by section. The thread holds the GIL nearly all of that
            time.
    """

    steps: int = 0
    prefills: int = 0
    tokens: int = 0
    waits: list[float] = field(default_factory=list)
    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))

    def per_step(self, seconds: dict[str, float]) -> float:
        return sum(seconds.values()) / self.steps if self.steps else 0.0

    @property
    def batch(self) -> float:
        """Requests in a batch, on average."""
        return self.tokens / self.steps if self.steps else 0.0


@contextmanager
def profiled(worker: EngineWorker) -> Iterator[StepProfile]:
    """Measure an engine's steps while the block lasts. The block must keep the engine busy.

    Raises:
        EngineStopped: The engine left meanwhile.
    """
    clock = _Clock(StepProfile())
    found: list[tuple[Any, str, Any]] = []

    def begin() -> None:
        scheduler = worker.scheduler
        tp_worker: Any = scheduler.tp_worker
        steady = scheduler.steady
        for owner, sections in (
            (scheduler, _SCHEDULER),
            (scheduler.tree_cache, _PREFIX_CACHE),
            (scheduler.token_to_kv_pool_allocator, _ALLOCATOR),
            (scheduler.device_wait, _DEVICE_WAIT),
            (steady, _STEADY),
            (steady.admission, _ADMISSION),
            (steady.prefill, _PREFILL),
            (scheduler.prefill_program, _PREFILL_STEP),
            (steady.program, _STEADY_PROGRAM),
            (getattr(steady.program, "sender", None), _SENDER),
            (tp_worker, _WORKER),
            (tp_worker.worker.model_runner, _RUNNER),
        ):
            for name, section in sections.items():
                if hasattr(owner, name):
                    found.append((owner, name, vars(owner).get(name)))
                    method = getattr(owner, name)
                    if name in (*_SINGLE, *_STEPS):
                        method = clock.counted(scheduler, method)
                    setattr(owner, name, clock.timed(section, method))

        running = scheduler.running
        found.append((running, "sampled_first", None))
        running.sampled_first = clock.with_waits(running.sampled_first)

    def end() -> None:
        for owner, name, before in found:
            if before is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)

    worker.channel.run(begin).result()
    try:
        yield clock.profile
    finally:
        worker.channel.run(end).result()


class _Clock:
    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        # Wall and processor time of inner sections, for each open section.
        self._inner: list[list[float]] = []

    def counted(self, scheduler: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counting(*args: Any, **kwargs: Any) -> Any:
            steps = args[2] if method.__name__ in _STEPS else 1
            self.profile.steps += steps
            self.profile.prefills += scheduler.cur_batch.forward_mode.is_extend()
            self.profile.tokens += steps * scheduler.cur_batch.batch_size()
            return method(*args, **kwargs)

        return counting

    def with_waits(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(request: Request, req: Any) -> None:
            method(request, req)
            self.profile.waits.append(request.first_token_at - request.taken_at)

        return noting

    def timed(self, section: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timing(*args: Any, **kwargs: Any) -> Any:
            self._inner.append([0.0, 0.0])
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                inner = self._inner.pop()
                self.profile.wall[section] += wall - inner[0]
                self.profile.cpu[section] += cpu - inner[1]
                if self._inner:
                    self._inner[-1][0] += wall
                    self._inner[-1][1] += cpu

        return timing
