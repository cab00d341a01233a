"""Upstream's Scheduler, pinned to its devices and fed by a channel.

Reaches into upstream's Scheduler: its methods are overridden, its queues and batches changed.

What breaks: Requests and results go through sockets. The log-probabilities of these results repeat
past 50 tokens, and are misaligned in a mixed batch.
Why: Upstream's scheduler expects a process of its own, and a detokenizer in another one.
Remove when: Upstream's loop takes requests as objects from its caller, and returns results so.

The constructor checks that all overridden and used names exist. Its error names missing ones.
Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from sgl_jax.srt.managers.io_struct import AbortReq
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.common import release_kv_cache

from enginepool.dispatch.request import aborted
from enginepool.engine.adapter_admission import AdapterAdmission
from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.admission import fill, message
from enginepool.engine.common_programs import share
from enginepool.engine.config_reads import noted_reads
from enginepool.engine.device_wait import DeviceWait
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.grammar import check_upstream
from enginepool.engine.kv_cache import KVCache
from enginepool.engine.prefill_program import PrefillProgram
from enginepool.engine.prefix_cache import cached_prefix, evict_more, kv_usage
from enginepool.engine.routed_experts import RoutedExperts, expert_dtype
from enginepool.engine.scoring import Scorer, running_count
from enginepool.engine.scoring_steps import ScoringBetweenSteps
from enginepool.engine.steady.decode import SteadyDecode
from enginepool.engine.steady.prefill import Prefill
from enginepool.engine.steady.prefill_step import steady_programs
from enginepool.engine.teardown import release_all
from enginepool.engine.top_logprobs import TopLogprobs
from enginepool.engine.upstream_prefill import UpstreamPrefill
from enginepool.lora.layers import adapting
from enginepool.process.upstream import expect
from enginepool.weights.leaves import EngineLeaves
from enginepool.weights.mapping import HuggingFaceMapping

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.managers.scheduler import GenerationBatchResult
    from sgl_jax.srt.server_args import ServerArgs

    from enginepool.dispatch.request import Request
    from enginepool.engine.channel import Channel


_OVERRIDDEN = (
    *("watchdog_thread", "stream_output", "get_new_batch_prefill", "check_memory"),
    *("run_batch", "process_batch_result"),
)
_USED = (
    *("waiting_queue", "chunked_reqs", "running_batch", "last_batch", "cur_batch"),
    *("tree_cache", "token_to_kv_pool_allocator", "max_running_requests", "stream_interval"),
    *("handle_generate_request", "abort_request", "flush_cache", "event_loop_normal", "tp_worker"),
)


# Returned in place of a step's result that steady decode has already processed.
_PROCESSED: Any = object()


class PinnedScheduler(ScoringBetweenSteps, Scheduler):
    """A real upstream Scheduler on an explicit mesh, stepped by the thread that built it."""

    def __init__(self, server_args: ServerArgs, mesh: Mesh, channel: Channel) -> None:
        self.running, self.condition, self.wake = channel.running, channel.condition, channel.wake
        expect(Scheduler, *_OVERRIDDEN)
        check_upstream()
        # Upstream has one capturer of experts per process.
        with_experts = getattr(server_args, "enable_return_routed_experts", False)
        server_args.enable_return_routed_experts = False
        # No ports: upstream opens none when it is given a channel.
        unused: Any = None
        backend: Any = channel
        # `noted_reads` ends before `share` compares models: while it records, all models differ.
        with adapting(), noted_reads() as self.config_reads:
            super().__init__(server_args, unused, communication_backend=backend, mesh=mesh)
        expect(self, *_USED)
        model_runner: Any = self.tp_worker.worker.model_runner
        share(model_runner, common_programs())
        self.top_logprobs = TopLogprobs(model_runner)
        self.device_wait = DeviceWait(model_runner, channel.limiter)
        evict_more(self.tree_cache, self.max_total_num_tokens)
        self.leaves = EngineLeaves(model_runner)
        self.kv_cache = KVCache(model_runner)
        self.adapters = self._adapter_admission = None
        if self.leaves.adapter_specs:
            slots = self.adapters = AdapterSlots(model_runner.model, self.leaves)
            self._adapter_admission = AdapterAdmission(channel.adapters, slots, self.running)
            self._adapter_admission.install(self.tp_worker.worker)
        experts = expert_dtype(model_runner.model_config) if with_experts else None
        upstream_prefill = UpstreamPrefill(self.tp_worker.worker, self.adapters, experts)
        routing = upstream_prefill.routing() if with_experts else None
        self.routed_experts = routing and RoutedExperts(self, routing, self.running)
        programs = steady_programs(self, channel.max_decode_steps, self.adapters, routing)
        steady_prefill = None if programs is None else programs.prefill
        self.prefill_program: PrefillProgram = steady_prefill or upstream_prefill
        # A program takes at most `sequences` requests: a row for each token of the largest prefill.
        self.max_running_requests = min(self.max_running_requests, self.prefill_program.sequences)
        self.scorer = Scorer(
            self,
            self.prefill_program,
            channel.condition.weights,
            has_work=self.has_work,
            cannot_hold=self._cannot_hold,
        )
        outputs = self.device_wait, self.top_logprobs, self.routed_experts
        prefill = steady_prefill and Prefill(self, steady_prefill, self.running, *outputs)
        self.steady = SteadyDecode(
            self,
            channel,
            self.scorer,
            self.device_wait,
            None if programs is None else programs.decode,
            prefill,
        )

    # What upstream calls

    def watchdog_thread(self) -> None:
        """Called by upstream's constructor on a thread of its own, which ends here at once.

        What breaks: A step that takes long ends the host's parent process. The weights of a closed
        engine stay, because the thread has no end and holds the scheduler.
        Why: Upstream's watchdog assumes that its process is a child of upstream's launcher.
        Remove when: It can be switched off. The pool has a watchdog of its own.
        """

    def run_batch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run a step. Decode steps run until something needs a step boundary."""
        if self.steady.run(batch):
            return _PROCESSED
        if (prefill := self.steady.prefill) is not None:
            return prefill.run(batch)
        self.top_logprobs.begin(batch, self.running.held)
        return super().run_batch(batch)

    def process_batch_result(
        self, batch: ScheduleBatch, result: GenerationBatchResult, *args: Any, **kwargs: Any
    ) -> None:
        """Process a step's result. Steady decode has processed its own."""
        if result is not _PROCESSED:
            if self.routed_experts is not None:
                self.routed_experts.collect(batch)
            super().process_batch_result(batch, result, *args, **kwargs)

    def stream_output(self, reqs: list[Req], *_: object, **__: object) -> None:
        """Take the outputs from the requests themselves, after every step.

        Upstream's message to its detokenizer repeats log-probabilities past 50 tokens and is
        misaligned in a mixed batch.
        """
        running = self.running
        with running.lock:
            self.top_logprobs.collect(running.held)
            if broken := running.not_finite(reqs):
                running.end_not_finite(broken, alone=len(reqs) == 1)
                self.condition.kv_not_finite = True
                for request in broken:
                    self.abort(request.internal_rid)
            running.process_outputs(reqs, self.stream_interval)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Admit requests.

        A waiting request has no KV cache. Its prefix is looked up among entries of the current
        weights, even if the request is older than these weights.
        """
        self.scorer.make_way(running_count(self))
        held = self.running.held
        waiting = list(self.waiting_queue)
        for req in waiting:
            if (request := held.get(req.rid)) is not None:
                req.extra_key = self.running.cache_key(request)
        in_chunks = [req for req in self.chunked_reqs if req is not None]
        batch = super().get_new_batch_prefill()
        if batch is not None:
            started = {req.rid for req in waiting}
            for req in batch.reqs_info[0].reqs:
                goes_on = req in in_chunks
                if (goes_on or req.rid in started) and (request := held.get(req.rid)) is not None:
                    self.running.prefilled(request, goes_on=goes_on)
        return batch

    def check_memory(self) -> None:
        """Upstream's check for lost pages. It does not know the pages of scored prompts."""
        if not self.scorer.holds_kv:
            super().check_memory()

    # What the channel calls, on this thread

    def has_work(self) -> bool:
        return bool(
            self.waiting_queue
            or self.last_batch is not None
            or not self.running_batch.is_empty()
            or any(req is not None for req in self.chunked_reqs)
        )

    def check_weights(self) -> None:
        """Check shared weights after idling: a trainer may have donated them meanwhile. A step
        would then fail, with requests that another engine can run.

        Raises:
            LookupError: Weights are gone.
        """
        if lost := self.leaves.lost_by_owner():
            raise LookupError(f"{lost[0]} was deleted or donated")

    def room(self, load: int) -> int:
        """How many more requests can start; 0 while one waits for KV cache."""
        waits = self.waiting_queue or self.scorer.waits_for_room
        return 0 if waits else self.max_running_requests - load

    def prefilling(self) -> bool:
        """Whether a prompt still has tokens to prefill or to score."""
        in_chunks = any(req is not None for req in self.chunked_reqs)
        return bool(self.waiting_queue) or in_chunks or self.scorer.has_prompts

    def cached_prefix(self, request: Request) -> int:
        return cached_prefix(self, request.input_ids, self.running.cache_key(request))

    def kv_usage(self) -> tuple[int, int]:
        return kv_usage(self)

    def admit(self, request: Request) -> Req | None:
        """Create upstream's request, with the outputs that it already has.

        Returns:
            None for a request whose prompt is scored first. `_scored` admits it again. None also
            for a request that ends here: it was only to be scored, or its output is complete.
        """
        if self._adapter_admission is not None:
            self._adapter_admission.admit(request)
        if self.scorer.take(request):
            return None
        if request.scoring is not None and request.scoring.alone:
            self.running.deliver_scored(request)
            return None
        self.handle_generate_request(message(request, self.running.cache_key(request)))
        req = self.waiting_queue[-1]
        fill(req, request)
        if request.given and not request.begun:
            req.check_finished()
            if req.finished():
                self.waiting_queue.pop()
                self.running.deliver(request, req)
                return None
        return req

    def may_start(self) -> Callable[[Request], bool]:
        admission = self._adapter_admission
        return (lambda _: True) if admission is None else admission.may_start()

    def abort(self, internal_rid: str) -> None:
        """End one request, at a step boundary. See `StepScheduler.abort`."""
        if self.scorer.drop(internal_rid):
            self.running.end(internal_rid, aborted("it was aborted", "cancelled"))
            return
        self.abort_request(AbortReq(rid=internal_rid))
        request = self.running.held.get(internal_rid)
        req = None if request is None else request.req
        if request and req and req.to_finish and req not in self.chunked_reqs:
            # Upstream would end it after one more step, and may retract it first.
            req.check_finished()
            release_kv_cache(req, self.tree_cache)
            self.running.deliver(request, req)

    @cached_property
    def hugging_face(self) -> HuggingFaceMapping:
        """Which Hugging Face tensors make this engine's leaves. Any thread."""
        runner = self.tp_worker.worker.model_runner
        quantization = self.leaves.quantization
        config = runner.model_config if quantization is None else quantization.model_config
        return HuggingFaceMapping(runner.model, config, self.leaves.source_specs)

    def release_all(self) -> None:
        """See `teardown.release_all`. The caller has taken the requests out before."""
        self.scorer.forget()
        release_all(self)

    def reset(self) -> None:
        """`release_all`, and new KV buffers: a failed step may have consumed the old ones."""
        self.release_all()
        self.kv_cache.renew()
        if self.adapters is not None:
            self.adapters.renew()
