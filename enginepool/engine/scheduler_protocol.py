"""What a channel needs of the scheduler behind it: the engine's, or the tests' scripted one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from enginepool.dispatch.request import Request

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req


class StepScheduler(Protocol):
    """All on the engine's thread, but for `kv_usage`."""

    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def look_at_weights(self) -> None:
        """After idling: raise LookupError where weights are gone."""

    def room(self, load: int) -> int:
        """How many more requests can start beside so many."""
        ...

    def prefilling(self) -> bool:
        """Whether it has prompts to compute."""
        ...

    def cached_prefix(self, request: Request) -> int:
        """How many tokens of the prompt the engine's prefix cache has."""
        ...

    def admit(self, request: Request) -> Req | None:
        """Make upstream's request of it, with the outputs that it has in place; None if its prompt
        is scored first."""

    def has_scores(self) -> bool:
        """Whether `score` would do something."""
        ...

    def score(self) -> None:
        """Compute log-probabilities of prompts, for about as long as a prefill takes."""

    def abort(self, internal_rid: str) -> None:
        """End one request; the channel hears of it at once or after one more step."""

    def release_all(self) -> None:
        """Forget every request, and give back their KV pages."""

    def reset(self) -> None:
        """`release_all`, and new KV buffers."""

    def kv_usage(self) -> tuple[int, int]:
        """Tokens of KV cache in use, and in all. Any thread."""
        ...
