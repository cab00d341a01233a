"""The engine failures that one request was part of."""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet


class FaultHistory:
    """The failures of engines that held a request.

    The thread that took the request out of an engine writes it. While an engine holds the request,
    that engine's thread records finite numbers.

    Attributes:
        reasons: Why each engine failed, by engine index.
        count: How many failures in a row it was part of, without an output token in between.
        runs_alone: Whether it must run without other requests, because it may make engines fail.
        starts_alone: Whether its prompt must be prefilled alone. It was in a step that gave NaN or
            infinity, and it has had no finite numbers since.
        nonfinite_under: The update of weights under which its own numbers were not finite.
        nonfinite_on: When its own numbers were not finite, in `time.perf_counter`, by engine index.
        finite_under: The update of weights under which its latest numbers were finite. None if its
            latest numbers were not, or if it has none.
    """

    __slots__ = (
        *("_outputs", "count", "finite_under", "nonfinite_on", "nonfinite_under", "reasons"),
        *("runs_alone", "starts_alone"),
    )

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.count = 0
        self.runs_alone = self.starts_alone = False
        self.nonfinite_under: int | None = None
        self.nonfinite_on: dict[int, float] = {}
        self.finite_under: int | None = None
        self._outputs = -1

    def add(self, engine_index: int, reason: str, outputs: int) -> None:
        """Record that an engine failed while it held the request, which has `outputs` output
        tokens."""
        self.reasons[engine_index] = f"engine {engine_index}: {reason}"
        self.count = 1 if outputs > self._outputs else self.count + 1
        self._outputs = outputs

    def add_not_finite(self, engine_index: int, reason: str, update: int) -> bool:
        """Record that its numbers were not finite in a step that no other request shared. Returns
        whether this is the second time under this update of weights.
        """
        again = self.nonfinite_under == update
        if not again:
            self.nonfinite_on = {}
        self.nonfinite_under, self.finite_under = update, None
        self.nonfinite_on[engine_index] = time.perf_counter()
        self.reasons[engine_index] = f"engine {engine_index}: {reason}"
        self.starts_alone = True
        return again

    def record_finite(self, update: int) -> None:
        """Record that its own numbers were finite under this update of weights."""
        self.starts_alone = False
        self.nonfinite_under, self.finite_under = None, update

    def may_run_on(self, engine_index: int, serving: AbstractSet[int]) -> bool:
        """Whether an engine may run the request. An engine that failed while it held the request
        may run it only if every serving engine has failed while it held the request."""
        return engine_index not in self.reasons or self.reasons.keys() >= serving

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())
