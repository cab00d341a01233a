"""Prefills prompts that wait, at a step boundary: the next prefill is launched before one is read.

Reaches into upstream's scheduler, prefix cache and batches.

What breaks: Between two prefills the device waits for the host.
Why: Upstream schedules the next prefill when it has read the last one's tokens.
Remove when: With `program.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginepool.engine.steady.upstream_batch import drop_ended, join, write_back_batch

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
    from sgl_jax.srt.managers.scheduler import Scheduler

    from enginepool.engine.channel import Channel
    from enginepool.engine.scoring import Scorer
    from enginepool.engine.steady.prefill import LaunchedPrefill, Prefill


class Fill:
    """Used on the engine's thread, where no decode step is in flight."""

    def __init__(
        self, scheduler: Scheduler, channel: Channel, scorer: Scorer, prefill: Prefill
    ) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._scorer, self._prefills = scorer, prefill

    def run(self, batch: ScheduleBatch) -> None:
        """Run the prefill that upstream has prepared, and those after it, until something needs a
        step boundary. Their requests are in upstream's running batch afterwards."""
        launched = self._launch(batch)
        while (following := self._following()) is not None:
            self._channel.steps += 1
            try:
                behind = self._launch(following)
            except BaseException:
                self._prefills.finish(launched)
                raise
            self._prefills.finish(launched)
            launched = behind
        self._prefills.finish(launched)
        running = self._scheduler.running_batch
        drop_ended(running)
        write_back_batch(running)
        # Upstream would add these requests once more.
        info = batch.reqs_info[0]
        info.reqs, info.chunked_req = [], None

    def _launch(self, batch: ScheduleBatch) -> LaunchedPrefill:
        launched = self._prefills.begin(batch)
        join(self._scheduler.running_batch, launched.complete)
        return launched

    def _following(self) -> ScheduleBatch | None:
        """Let upstream prepare the next prefill, if prompts wait that are to be generated from."""
        scheduler, scorer = self._scheduler, self._scorer
        chunked = [req for req in scheduler.chunked_reqs if req is not None]
        waits = scheduler.waiting_queue or chunked
        # Whether upstream is told to decode between two prefills (SGL_DECODE_FIRST_INTERLEAVE).
        decodes_first = getattr(scheduler, "_decode_first_n", 0)
        scores = scorer.has_prompts or scorer.holds_kv
        if not waits or decodes_first or scores or self._channel.has_jobs():
            return None
        for req in chunked:
            scheduler.tree_cache.cache_unfinished_req(req)
        return scheduler.get_new_batch_prefill()
