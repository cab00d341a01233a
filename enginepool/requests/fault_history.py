"""In which failures of engines a request was present."""

from __future__ import annotations

from collections.abc import Set as AbstractSet


class FaultHistory:
    """Kept while the request is in no engine, by the thread that took it out.

    Attributes:
        reasons: Why, by the engine that failed.
        count: In how many failures in a row it was, without an output token in between.
        runs_alone: It runs with nothing beside it: it may be what makes engines fail.
        nonfinite_under: The update of weights under which its log-probabilities were not finite.
    """

    __slots__ = ("_outputs", "count", "nonfinite_under", "reasons", "runs_alone")

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.count = 0
        self.runs_alone = False
        self.nonfinite_under: int | None = None
        self._outputs = -1

    def add(self, engine_index: int, reason: str, outputs: int) -> None:
        """An engine failed with the request in it, which has so many output tokens."""
        self.reasons[engine_index] = f"engine {engine_index}: {reason}"
        self.count = 1 if outputs > self._outputs else self.count + 1
        self._outputs = outputs

    def add_not_finite(self, engine_index: int, reason: str, update: int) -> bool:
        """An engine failed on the request's own log-probability; returns whether that is the
        second time under this update of weights."""
        again = self.nonfinite_under == update
        self.nonfinite_under = update
        self.reasons[engine_index] = f"engine {engine_index}: {reason}"
        return again

    def may_run_on(self, engine_index: int, serving: AbstractSet[int]) -> bool:
        """Not where it was present in a failure, while another engine serves."""
        return engine_index not in self.reasons or self.reasons.keys() >= serving

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())
