"""The requests that an engine holds, and their outputs so far."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from enginepool.dispatch.condition import WeightsCondition
from enginepool.dispatch.request import Request, aborted, not_finite
from enginepool.engine.grammar import RequestGrammar
from enginepool.errors import NotFinite
from enginepool.lora.adapter import Adapter

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req


class RunningRequests:
    """An engine's requests. Used on the engine's thread.

    Another thread may call `retract` when a step does not return. `lock` is held wherever requests
    leave, because that step may return at that moment.

    Attributes:
        held: The requests, by internal id.
        last_end: When a request was last delivered, in `time.perf_counter`.
    """

    def __init__(self, weights: WeightsCondition) -> None:
        self.held: dict[str, Request] = {}
        self.lock = threading.RLock()
        self.last_end = 0.0
        self._weights = weights
        self._starting: Request | None = None

    def __len__(self) -> int:
        return len(self.held)

    @property
    def unfinished(self) -> int:
        """How many requests here have not ended. One that was aborted in a paused engine while its
        prompt is in chunks has ended, and stays here until the next step. Any thread."""
        return sum(request.finish_reason is None for request in list(self.held.values()))

    @property
    def has_one_alone(self) -> bool:
        """Whether the engine has a request that runs alone, or one that starts alone and has not
        started."""
        starting = self._starting
        if starting is not None:
            if starting.faults.starts_alone and starting.internal_rid in self.held:
                return True
            self._starting = None
        return len(self.held) == 1 and next(iter(self.held.values())).faults.runs_alone

    def progressed(self) -> bool:
        """Whether every request here has gained a token since it was last retracted."""
        return all(map(_has_progressed, self.held.values()))

    def cache_key(self, request: Request) -> str | None:
        """The namespace of the prefix cache, for the weights that the engine has now. So entries of
        other weights are never found.

        A request that has KV cache when weights are replaced keeps its key, so what it adds stays
        out of the new namespace. See `PinnedScheduler.get_new_batch_prefill`.
        """
        update, adapter = self._weights.update, request.adapter
        if not update and request.extra_key is None and adapter is None:
            return None
        of_adapter = "" if adapter is None else f":{adapter.number}"
        return f"{update}{of_adapter}/{request.extra_key or ''}"

    def prefilled(self, request: Request, *, goes_on: bool) -> None:
        """Record that a step computes KV cache of the prompt, all of it or a chunk.

        Args:
            goes_on: Whether an earlier step has computed a chunk.
        """
        if request.output_ids or (request.req is not None and request.req.output_ids):
            return  # it resumes, and the versions of its prompt are known
        if not goes_on:
            request.prompt_weight_versions = []
        version = self._weights.version
        if version not in request.prompt_weight_versions:
            request.prompt_weight_versions.append(version)

    def sampled_first(self, request: Request, req: Req) -> None:
        """Record the first token. The number of cached tokens is recorded at the first admission
        only: a later one would count outputs, too."""
        request.first_token_at = time.perf_counter()
        if request.cached_tokens is None:
            # A resumed request's outputs may be cached, too, as the prompt of another request.
            request.cached_tokens = min(req.cached_tokens, len(request.input_ids))

    def record_finite(self, request: Request) -> None:
        """Record that a request's own numbers are finite under the weights that the engine has."""
        self._weights.record_finite()
        request.faults.record_finite(self._weights.update)

    def set_weights(self, version: int | str, update: int) -> None:
        """Record that the next tokens come from these weights. Earlier ones keep their version."""
        for request in self.held.values():
            self.take_over(request, keep=True)
        self._weights.record_update(version, update)

    def adapters(self) -> Counter[int]:
        """How many requests run, by the number of their adapter."""
        adapters = [request.adapter for request in self.held.values()]
        return Counter(adapter.number for adapter in adapters if adapter is not None)

    def replace_adapter(self, adapter: Adapter) -> dict[Request, Adapter]:
        """Let requests under older versions of this adapter continue under this version. Tokens so
        far keep the old version.

        Returns:
            The adapter that each request had.
        """
        before = {}
        for request in self.held.values():
            if request.adapter is not None and request.adapter.line == adapter.line:
                self.take_over(request, keep=True)
                before[request], request.adapter = request.adapter, adapter
        return before

    def hold(self, requests: Iterable[Request]) -> None:
        """Add requests that the engine holds from now on."""
        for request in requests:
            self.held[request.internal_rid] = request
            if request.faults.starts_alone:
                self._starting = request

    def not_finite(self, reqs: list[Req]) -> list[Request]:
        """The requests whose newest log-probability is not a finite number."""
        broken = [
            req.rid
            for req in reqs
            if (values := req.output_token_logprobs_val) and not math.isfinite(values[-1])
        ]
        return [self.held[rid] for rid in broken if rid in self.held]

    def process_outputs(self, reqs: list[Req], stream_interval: int) -> None:
        """Publish new tokens of streams, and deliver requests that have ended, after a step. The
        caller holds `lock`.

        Args:
            stream_interval: How many tokens a chunk has, where a request does not say.
        """
        for req in reqs:
            request = self.held.get(req.rid)
            if request is None:
                continue
            if not request.first_token_at and len(req.output_ids) > request.given:
                self.sampled_first(request, req)
            if request.faults.starts_alone and len(req.output_ids) > request.retracted_at:
                self.record_finite(request)
            if req.finished():
                self.deliver(request, req)
            elif req.stream:
                interval = req.sampling_params.stream_interval or stream_interval
                # A step may add several tokens. `request` has the tokens that were published.
                if len(req.output_ids) // interval > len(request.output_ids) // interval:
                    self.publish(request)

    # Requests leave

    def deliver(self, request: Request, req: Req) -> None:
        """Hand a finished upstream request to its caller."""
        self.last_end = time.perf_counter()
        if len(req.output_ids) > max(request.given, request.retracted_at):
            self._weights.record_finite()
        self.held.pop(request.internal_rid, None)
        self.take_over(request)
        finished: Any = req.finished_reason
        reason = finish_reason(req, finished.to_json())
        if reason.get("type") == "abort" and request.abort_reason is not None:
            reason = request.abort_reason
        request.call.finish(request, reason)

    def deliver_scored(self, request: Request) -> None:
        """Hand a scored request, which generates nothing, to its caller."""
        assert request.scored is not None
        with self.lock:
            if self.held.pop(request.internal_rid, None) is None:
                return
            self.last_end = time.perf_counter()
            if request.scored.logprobs[-1] is not None:  # else nothing was computed
                self.record_finite(request)
            request.prompt_weight_versions = [request.scored.version]
            reason = {"type": "length", "length": len(request.scored.logprobs)}
            request.call.finish(request, reason)

    def end(self, internal_rid: str, reason: dict[str, Any]) -> None:
        """End a request with its tokens, if it is here. Its own reason to abort has precedence."""
        with self.lock:
            request = self.held.pop(internal_rid, None)
            if request is not None:
                self.take_over(request)
                request.call.finish(request, request.abort_reason or reason)

    def end_not_finite(self, requests: list[Request], *, alone: bool) -> None:
        """End requests whose newest log-probability is no finite number.

        Args:
            alone: Whether no other request shared the step.

        Raises:
            NotFinite: The weights are not yet known to be the fault, another request shared the
                step, or the engine holds other requests. No request is ended then.
        """
        known = self._weights.nonfinite_under == self._weights.update
        if not (known and alone and len(requests) == len(self.held)):
            raise NotFinite([request.internal_rid for request in requests], alone=alone)
        for request in requests:
            self.end(request.internal_rid, not_finite(self._weights.version, request.adapter))

    def retract(self) -> list[Request]:
        """Take every unfinished request out, with the tokens that it has.

        The scheduler's own state is not changed. If the engine stays, the caller calls the
        scheduler's `release_all` next.
        """
        with self.lock:
            for request in list(self.held.values()):
                req = request.req
                finished = req is not None and req.finished()
                self.take_over(request)
                # If the step that finished it has failed, its last token may be dropped. Then it is
                # not delivered.
                if req is not None and finished and len(request.output_ids) == len(req.output_ids):
                    self.deliver(request, req)
            requests, self.held = list(self.held.values()), {}
        for request in requests:
            request.retracted = True
            request.retracted_at = len(request.output_ids)
        return requests

    # Requests stay

    def publish(self, request: Request) -> None:
        """Offer the tokens of a streamed request so far to its caller."""
        self.take_over(request, keep=True)
        request.call.publish(request, request.output_ids, request.logprobs)

    def take_over(self, request: Request, *, keep: bool = False) -> None:
        """Copy the outputs of upstream's request. Drop that request, unless `keep`."""
        req = request.req
        if req is None:
            return
        logprobs = req.output_token_logprobs_val or ()
        request.absorb(list(req.output_ids), list(logprobs), self._weights.version)
        if not keep:
            request.req = None


def finish_reason(req: Req, reason: dict[str, Any]) -> dict[str, Any]:
    """The reason why a request ended. If its grammar allowed no further token, the reason is
    "abort". Upstream's reason is "stop" then."""
    grammar: RequestGrammar | None = req.grammar
    if reason.get("type") != "stop" or grammar is None or grammar.failure is None:
        return reason
    return aborted(f"the output cannot continue under its grammar: {grammar.failure}", "grammar")


def _has_progressed(request: Request) -> bool:
    if request.req is not None:
        return len(request.req.output_ids) > request.retracted_at
    # Its prompt is being scored. That is progress, unless the request was retracted: a retract
    # drops the scores so far, so the prompt must be scored completely.
    return request.scoring is not None and request.scored is None and not request.retracted
