"""Runs upstream's prefill batches in two programs.

Reaches into upstream's requests, batches and results.

What breaks: A prefill of eight short prompts takes the host as long as twenty decode steps.
Why: Upstream pads and sends each field of a batch by itself, and reads its results one by one.
Remove when: With `program.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from sgl_jax.srt.managers.scheduler import GenerationBatchResult

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.engine.grammar import open_mask
from enginepool.engine.steady.device_batch import FROM_TABLE, Features, StepOutput
from enginepool.engine.steady.penalties import entries

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.managers.scheduler import Scheduler

    from enginepool.engine.device_wait import DeviceWait
    from enginepool.engine.routed_experts import RoutedExperts
    from enginepool.engine.running import RunningRequests
    from enginepool.engine.steady.prefill_step import HostPrompts, PrefillStep
    from enginepool.engine.top_logprobs import TopLogprobs


@dataclass
class LaunchedPrefill:
    """A prefill that is launched.

    Attributes:
        experts: The experts of each id, if the engine returns them.
        joining: The requests that can decode before the host knows their first ids, each with its
            row in the prefill. The others have a grammar, or more chunks.
        rows: The rows of these in a decode batch, if they are in one.
    """

    batch: ScheduleBatch
    output: StepOutput
    features: Features
    experts: jax.Array | None
    joining: list[tuple[int, Req]]
    rows: list[int] = field(default_factory=list)


class Prefill:
    """The prefills of one engine. Used on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        step: PrefillStep,
        running: RunningRequests,
        device_wait: DeviceWait,
        top_logprobs: TopLogprobs,
        experts: RoutedExperts | None,
    ) -> None:
        req_to_token = scheduler.req_to_token_pool
        assert req_to_token is not None
        self._scheduler, self._step = scheduler, step
        self._slots, self._page_size = req_to_token.req_to_token, scheduler.page_size
        self._vocab_size = scheduler.model_config.vocab_size
        self._running, self._top_logprobs = running, top_logprobs
        self._device_wait, self._experts = device_wait, experts

    def run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run a prefill, in place of upstream's `run_batch`."""
        return self.read(self.begin(batch))

    def begin(self, batch: ScheduleBatch) -> LaunchedPrefill:
        """Launch a prefill."""
        self._scheduler.forward_ct += 1
        step, info = self._step, batch.reqs_info[0]
        reqs = info.reqs
        prompts = step.prompts(len(info.input_ids))
        penalised = self._fill(prompts, reqs, info)
        asking = self._top_logprobs.asking(batch, self._running.held)
        grammars: dict[int, Any] = {
            row: req.grammar for row, req in enumerate(reqs) if req.grammar and req.is_chunked <= 0
        }
        features = Features.of(
            [request for *_, request in asking],
            penalised=bool(penalised),
            masked=bool(grammars),
        )
        names = mask = tallies = None
        if features.named:
            names = np.zeros((step.sequences, MAX_NAMED_IDS), np.int32)
            for row, _, request in asking:
                names[row, : len(request.named_ids)] = request.named_ids
        if features.masked:
            mask = open_mask(self._vocab_size, step.sequences)
            for row, grammar in grammars.items():
                grammar.fill_vocab_mask(mask, row)
        found = entries(penalised, reqs)
        if found.size:
            tallies = step.tallies(penalised, found)
        sent = step.send(prompts, features, names, mask)
        output, experts = step.launch(len(prompts.ids), sent, tallies)
        output.ids.copy_to_host_async()
        joining = [
            (row, req) for row, req in enumerate(reqs) if not req.grammar and req.is_chunked <= 0
        ]
        return LaunchedPrefill(batch, output, features, experts, joining)

    def _fill(self, prompts: HostPrompts, reqs: list[Req], info: Any) -> list[int]:
        """Put requests into the rows. Returns the rows with penalties."""
        size, table, place = self._page_size, prompts.table, 0
        prompts.ids[: len(info.input_ids)] = info.input_ids
        prompts.prefixes[: len(reqs)] = info.prefix_lens
        table.state[1, : len(reqs)] = info.seq_lens
        penalised = []
        for row, (req, length) in enumerate(zip(reqs, info.seq_lens.tolist(), strict=True)):
            pages = self._slots[req.req_pool_idx, :length:size]
            prompts.pages[place : place + len(pages)] = pages if size == 1 else pages // size
            place += len(pages)
            request = self._running.held.get(req.rid)
            adapter = None if request is None else request.adapter
            table.set_adapter(row, *self._step.adapter_row(adapter))
            if req.is_chunked > 0:
                continue  # its next chunk follows
            table.origin[row] = FROM_TABLE
            table.set_sampling(row, req.sampling_params)
            if table.penalties.set_row(row, req):
                penalised.append(row)
        return penalised

    def read(self, launched: LaunchedPrefill) -> GenerationBatchResult:
        """Wait for a prefill. Returns what upstream's `run_batch` would."""
        batch, output, features = launched.batch, launched.output, launched.features
        self._device_wait.until_ready(output.ids)
        info = batch.reqs_info[0]
        ids, logprobs = np.asarray(output.ids)[:, : len(info.reqs)]
        if self._experts is not None:
            self._experts.computed(launched.experts)
        if features.top or features.named or features.kept:
            self._top_logprobs.begin(batch, self._running.held)
            top = np.asarray(output.top) if features.top else None
            self._top_logprobs.computed(
                (
                    None if top is None else top[1].view(np.float32),
                    None if top is None else top[0],
                    np.asarray(output.named) if features.named else None,
                    np.asarray(output.kept) if features.kept else None,
                )
            )
        # All that upstream reads of a prefill's result.
        info.output_ids = ids.copy()
        batch.per_dp_bs_size = self._step.sequences
        result: Any = SimpleNamespace(next_token_logprobs=logprobs.view(np.float32).astype(float))
        nothing: Any = None
        return GenerationBatchResult(
            logits_output=result,
            next_token_ids=ids.tolist(),
            extend_input_len_per_req=nothing,
            extend_logprob_start_len_per_req=nothing,
            bid=batch.bid,
            cache_miss_count=0,
        )
