"""A request is one sample of one prompt. A call is the requests of one user call.

A request can resume. It has its prompt, its output ids so far and its parameters, and an engine
admits it with those outputs in place. So it can move to another engine after a fault.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from enginepool.dispatch.fault_history import FaultHistory
from enginepool.dispatch.grammar import Grammar
from enginepool.dispatch.routed_experts import RoutedTokens
from enginepool.dispatch.routing import MIN_SHARED_PREFIX, Candidate
from enginepool.dispatch.sampling_mask import Kept
from enginepool.dispatch.scoring import Scored, Scoring
from enginepool.dispatch.thinking import Thinking
from enginepool.lora.adapter import Adapter

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

# The largest `top_logprobs_num`, which is OpenAI's limit. Engines compute this many even if
# requests ask for fewer.
MAX_TOP_LOGPROBS = 20
# The most ids of `token_ids_logprob`. Engines compute this many even if requests ask
# for fewer.
MAX_NAMED_IDS = 64


class Signal(Protocol):
    """The signal that a waiting caller sleeps on. Any thread may call `set`."""

    def set(self) -> None: ...


def new_internal_rid() -> str:
    """A new id. All have one length, so none is a prefix of another: upstream aborts by prefix."""
    return uuid.uuid4().hex


def aborted(message: str, err_type: str) -> dict[str, Any]:
    """The finish reason of a request that was ended early, in upstream's form."""
    return {"type": "abort", "message": message, "err_type": err_type}


def not_finite(version: int | str, adapter: Adapter | None) -> dict[str, Any]:
    """The finish reason of a request without finite log-probabilities. It was tried again, or the
    weights were already known to be at fault."""
    under = f"weight version {version!r}"
    if adapter is not None:
        under += f" and adapter {adapter.name!r} of version {adapter.version!r}"
    return aborted(
        f"the log-probabilities are not finite numbers with {under}: look at the weights and at "
        "the prompt",
        "not_finite",
    )


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one prompt.

    While an engine holds it, that engine's thread writes it. The caller reads it after
    `finish_reason` is set. Before that the caller reads `snapshot`, which is replaced and never
    changed.
    """

    call: Call
    input_ids: list[int]
    sampling: SamplingParams | None  # normalized; copied for each admission; None: only scored
    text: str | None = None
    prompt_index: int = 0
    sample_index: int = 0
    position: int = 0  # in its call
    rid: str = ""  # the caller's id, if it gave one
    return_logprob: bool = False
    top_logprobs_num: int = 0
    named_ids: Sequence[int] = ()  # the ids of `token_ids_logprob`
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    stream: bool = False
    extra_key: str | None = None
    adapter: Adapter | None = None  # the adapter that it runs under; None: the base alone
    pinned_to: int | None = None  # the only engine that may run it
    scoring: Scoring | None = None  # the prompt scores that are wanted
    grammar: Grammar | None = None  # the grammar of its output
    thinking: Thinking | None = None  # the thinking before that output
    internal_rid: str = field(default_factory=new_internal_rid)  # the id that engines use
    candidate: Candidate = field(init=False)

    given: int = 0  # output tokens that it had when it was submitted
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[list[float], list[int]]] = field(default_factory=list)
    named_logprobs: list[list[float]] = field(default_factory=list)  # of `named_ids`, by token
    kept: list[Kept] = field(default_factory=list)  # by token, with `return_sampling_mask`
    experts: RoutedTokens | None = None  # of its positions, if engines return them
    weight_versions: list[list[Any]] = field(default_factory=list)
    lora_versions: list[list[Any]] = field(default_factory=list)  # the same for its adapter
    prompt_weight_versions: list[int | str] = field(default_factory=list)
    cached_tokens: int | None = None
    scored: Scored | None = None  # the result of `scoring`
    req: Req | None = None  # upstream's request, while an engine has it
    engine_index: int | None = None
    faults: FaultHistory = field(default_factory=FaultHistory)
    retracted: bool = False  # taken from an engine, to continue later
    # Its number of output tokens at that time; a swap retracts it again only if it has more
    retracted_at: int = 0
    abort_reason: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None
    snapshot: tuple[list[int], list[float]] | None = None
    created: float = field(default_factory=time.perf_counter)
    taken_at: float = 0.0  # when the first engine took it
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        prefix = None
        if len(self.input_ids) > MIN_SHARED_PREFIX:
            name = self.adapter.name if self.adapter is not None else None
            prefix = hash((self.extra_key, name, *self.input_ids[:MIN_SHARED_PREFIX]))
        self.candidate = Candidate(prefix, pinned=self.pinned_to is not None)

    @property
    def shown_rid(self) -> str:
        """The id that results show and `abort_request` takes."""
        return self.rid or self.internal_rid

    @property
    def wants_more(self) -> bool:
        """Whether it wants more values per token than the id and the log-probability."""
        return bool(self.top_logprobs_num or self.named_ids or self.return_sampling_mask)

    @property
    def begun(self) -> bool:
        """Whether it has output tokens of this pool."""
        return len(self.output_ids) > self.given

    @property
    def ran(self) -> bool:
        """Whether an engine has computed anything for it. With a partial output: whether an engine
        has computed a token."""
        return bool(self.begun or (self.prompt_weight_versions and not self.given))

    def absorb(self, output_ids: list[int], logprobs: list[float], version: int | str) -> None:
        """Take over all outputs that an engine has produced so far.

        A step that failed may have appended an id without all values that the request wants, or
        with a log-probability that is not finite. Such an id is dropped and sampled again.
        """
        values: list[Sequence[Any]] = [logprobs]
        values += [self.top_logprobs] if self.top_logprobs_num else []
        values += [self.named_logprobs] if self.named_ids else []
        values += [self.kept] if self.return_sampling_mask else []
        count = min(len(output_ids), *map(len, values))
        if count and not math.isfinite(logprobs[count - 1]):
            count -= 1
        self.output_ids, self.logprobs = output_ids[:count], logprobs[:count]
        del self.top_logprobs[count:]
        del self.named_logprobs[count:]
        del self.kept[count:]
        if self.experts is not None:
            self.experts.cut(len(self.input_ids) + count - 1)
        _extend(self.weight_versions, self.given, count, version)
        if self.adapter is not None:
            _extend(self.lora_versions, self.given, count, self.adapter.version)


def _extend(spans: list[list[Any]], given: int, count: int, version: int | str) -> None:
    """Extend an output's spans [start, end, version] to `count` tokens, with this version. The
    first `given` tokens came with the request, and their spans may end before the last of them."""
    while spans and spans[-1][0] >= count:
        spans.pop()
    end = spans[-1][1] if spans else 0
    if end > count or (spans and end >= given and spans[-1][2] == version):
        spans[-1][1] = count
    elif count > (start := max(end, given)):
        spans.append([start, count, version])


class Call:
    """The requests of one user call, and the signal of the caller that waits for them.

    Thread-safe. A request finishes once: the first reason counts, later ones are ignored.
    """

    def __init__(self, weight_version: int | str = 0, *, lone: bool = False) -> None:
        self.weight_version = weight_version  # the label of a request that ends without an output
        self.lone = lone  # one prompt was given, and not a list
        self.requests: list[Request] = []
        self.finished: deque[Request] = deque()  # in the order in which they ended
        self.failure: Exception | None = None
        self.on_finish: Callable[[Request], None] | None = None
        self._lock = threading.Lock()
        self._remaining = 0
        self._signal: Signal | None = None
        self._every = False

    def add(self, request: Request) -> None:
        request.position = len(self.requests)
        self.requests.append(request)
        self._remaining += 1

    @property
    def done(self) -> bool:
        return self._remaining == 0

    @property
    def remaining(self) -> int:
        return self._remaining

    def listen(self, signal: Signal, *, every: bool) -> None:
        """Wake `signal` when all requests have ended. `every`: also at each end and each chunk."""
        with self._lock:
            self._signal, self._every = signal, every
        if self.done or (every and self.finished):
            signal.set()

    def finish(self, request: Request, reason: dict[str, Any]) -> bool:
        """End a request. False if it had ended already."""
        with self._lock:
            if request.finish_reason is not None:
                return False
            request.finished_at = time.perf_counter()
            request.finish_reason = reason
            self._remaining -= 1
            self.finished.append(request)
            wake = self._every or self._remaining == 0
            signal = self._signal
        if self.on_finish is not None:
            self.on_finish(request)
        if wake and signal is not None:
            signal.set()
        return True

    def publish(self, request: Request, output_ids: list[int], logprobs: list[float]) -> None:
        """Publish the output of a streamed request so far. A reader sees the latest only."""
        if request.snapshot is not None and len(request.snapshot[0]) >= len(output_ids):
            return
        request.snapshot = (output_ids, logprobs)
        if self._every and self._signal is not None:
            self._signal.set()
