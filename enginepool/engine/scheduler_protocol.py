"""The scheduler that a channel needs: an engine's, or a scripted one of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from enginepool.dispatch.request import Request

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req


class StepScheduler(Protocol):
    """Called on the engine's thread, except `kv_usage`."""

    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def check_weights(self) -> None:
        """After idling: raise LookupError if weights are gone."""

    def room(self, load: int) -> int:
        """How many more requests can start beside `load` others."""
        ...

    def prefilling(self) -> bool:
        """Whether it has prompts to compute."""
        ...

    def cached_prefix(self, request: Request) -> int:
        """How many of the prompt's first tokens the engine's prefix cache has."""
        ...

    def may_start(self) -> Callable[[Request], bool]:
        """A function that says whether a waiting request can start. The oldest is asked first."""
        ...

    def admit(self, request: Request) -> Req | None:
        """Make upstream's request for a request of the pool, with the outputs that it already has.
        Returns None if its prompt is scored first, or if it has ended."""

    def has_scores(self) -> bool:
        """Whether `score` would do something."""
        ...

    def score(self) -> None:
        """Score prompts, for about as long as a prefill takes."""

    def abort(self, internal_rid: str) -> None:
        """End one request, at once or, if its prompt is in chunks, when the next step begins."""

    def release_all(self) -> None:
        """Drop every request, and free their KV pages."""

    def reset(self) -> None:
        """`release_all`, and new KV buffers."""

    def kv_usage(self) -> tuple[int, int]:
        """Tokens of KV cache in use, and in all. What the prefix cache may evict counts as free.
        Any thread."""
        ...
