"""Scores prompts between two steps of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from enginepool.dispatch.request import Request, aborted
from enginepool.dispatch.scoring import Scored

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req

    from enginepool.dispatch.condition import EngineCondition
    from enginepool.engine.device_wait import DeviceWait
    from enginepool.engine.running import RunningRequests
    from enginepool.engine.scoring import Scorer


class ScoringBetweenSteps:
    """The methods of a scheduler that score prompts, on the engine's thread."""

    scorer: Scorer
    running: RunningRequests
    condition: EngineCondition
    device_wait: DeviceWait
    wake: Callable[[], None]
    admit: Callable[[Request], Req | None]

    def has_scores(self) -> bool:
        """Whether `score` would compute something. Takes KV cache for prompts."""
        return self.scorer.ready()

    def score(self) -> None:
        """Score a piece of the waiting prompts."""
        complete, broken, alone = self.scorer.step(self.device_wait.until_ready)
        running = self.running
        with running.lock:  # if the step was abandoned, `held` is empty
            for requests, scored in complete:
                for request in requests:
                    if request.internal_rid in running.held:
                        self._scored(request, scored)
            broken = [request for request in broken if request.internal_rid in running.held]
            if broken:
                running.end_not_finite(broken, alone=alone)
                self.condition.kv_not_finite = True

    def _scored(self, request: Request, scored: Scored) -> None:
        request.scored = scored
        request.req = self.admit(request)

    def _cannot_hold(self, request: Request) -> None:
        """End a request whose prompt does not fit an empty KV cache."""
        reason = aborted("the engine's KV cache cannot hold this prompt", "out_of_memory")
        self.running.end(request.internal_rid, reason)
        self.wake()  # there is room again, and perhaps no step follows
