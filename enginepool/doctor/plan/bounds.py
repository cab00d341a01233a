"""The fastest possible decode step: the bytes that it must read, over the chip's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from enginepool.sizing.chips import Chip
from enginepool.sizing.memory import Memory

# The assumed time of an all-reduce, by which layouts are compared. It is not part of the bound.
ALL_REDUCE_MS = 0.010
# Smaller engines are preferred unless another layout promises this many times their tokens. The
# promises are bounds and no measurements, so a small difference means nothing. A fault, a swap or a
# wait of a smaller engine affects fewer chips.
CLEARLY_FASTER = 1.5

LEFT_OUT = (
    "all-reduces (counted, not timed), matrix arithmetic, activations, the sampler, prefill, the "
    "host's time between steps, and what attention reads twice"
)


@dataclass(frozen=True)
class Layout:
    """A host's chips as engines of `tp_size` chips each, with requests in flight on all.

    Attributes:
        memory: The memory of one chip, with this layout's `ServerArgs`.
        batch: Requests in flight on the host.
    """

    chip: Chip
    chips: int
    memory: Memory
    batch: int

    @property
    def tp_size(self) -> int:
        return self.memory.settings.tp_size

    @property
    def engines(self) -> int:
        return self.chips // self.tp_size

    @cached_property
    def running(self) -> int:
        """Requests in one engine's step: its share, limited by memory."""
        if not self.memory.serves:
            return 0
        share = -(-self.batch // self.engines)
        return min(share, self.memory.requests_at_context, self.memory.max_running_requests)

    @property
    def least_experts(self) -> int:
        """The experts of each layer that a step reads if all tokens choose the same ones."""
        return self.memory.shape.experts_per_token

    @property
    def uniform_experts(self) -> float:
        """The expected number of experts of each layer that a step reads if every expert is equally
        probable."""
        shape = self.memory.shape
        if not shape.experts:
            return 0.0
        return shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** self.running)

    def weight_bytes_read(self, experts: float) -> float:
        return self.memory.shape.weight_bytes_read(self.tp_size, experts)

    @property
    def kv_bytes_read(self) -> float:
        """The KV bytes that a step reads if requests have filled their context."""
        tokens = self.memory.shape.kv_tokens_read(self.memory.settings.context)
        return self.running * tokens * self.memory.kv_per_token

    def _step_ms(self, experts: float) -> float:
        return 1000 * (self.weight_bytes_read(experts) + self.kv_bytes_read) / self.chip.bandwidth

    @property
    def decode_ms(self) -> float:
        """The lower bound of a decode step's time."""
        return self._step_ms(self.least_experts)

    @property
    def uniform_ms(self) -> float:
        """A decode step's time with uniform routing. It is an estimate and no bound. For a dense
        model it equals `decode_ms`."""
        return self._step_ms(self.uniform_experts)

    @property
    def all_reduces(self) -> int:
        """The all-reduces of [batch, hidden] per step: after attention and MLP of each layer, and
        one more."""
        return 2 * self.memory.shape.layers + 1 if self.tp_size > 1 else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all engines, with uniform routing and the assumed all-reduces. Only
        for comparing layouts."""
        step = self.uniform_ms + self.all_reduces * ALL_REDUCE_MS
        return self.engines * self.running / step * 1000 if self.running else 0.0


def choose(layouts: list[Layout]) -> Layout | None:
    """The layout with the smallest engines, unless another one is clearly faster."""
    able = [layout for layout in layouts if layout.running]
    best = max((layout.tokens_per_second for layout in able), default=0.0)
    enough = (one for one in able if one.tokens_per_second * CLEARLY_FASTER >= best)
    return min(enough, key=lambda layout: layout.tp_size, default=None)
