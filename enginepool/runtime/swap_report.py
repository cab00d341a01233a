"""The report that `update_weights` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSwap:
    """One engine's part of an update.

    Attributes:
        pause_sec: Seconds from its last step on the old weights until it may take the next step.
            With mode="drain" they count from when the last engine had finished its outputs.
        shared: Leaves whose buffers are the source's own.
        copied: Leaves whose bytes are new.
        fingerprint: The fingerprint of all its weights afterwards; see `EnginePool.checksum`.
    """

    engine_index: int
    pause_sec: float
    shared: int
    copied: int
    fingerprint: str


@dataclass(frozen=True)
class QuantizedMatrix:
    """The error of a quantized matrix. NaN if the matrix has NaN or infinity.

    Attributes:
        relative_error: The norm of the error relative to the norm of the matrix (Frobenius).
        largest_error: The largest error of an element.
    """

    relative_error: float
    largest_error: float


@dataclass(frozen=True)
class SwapReport:
    """The result of an update of weights.

    Attributes:
        weight_version: The label that results carry from now on.
        staging: "double" (two sets for a while) or "stream" (leaf by leaf, engines stopped).
        nbytes: Bytes of the leaves that changed, on one engine.
        seconds: Seconds of each phase. "stage": read, convert and put on every device, while
            generation goes on (with staging="stream" or free_kv, while engines are stopped).
            "quiesce": until the engines stopped at a step boundary; with mode="drain" that is the
            wait for running outputs. "commit": until all had the new weights. "fingerprint":
            afterwards, while generation goes on again. "total".
        staged: The fingerprint of the weights as they were staged on the first engine. It equals
            the engines' fingerprints.
        engines: One entry for each engine that has the new weights.
        source: In a pool that quantizes: the fingerprint of the source's weights before they are
            quantized. If the source has all weights, it equals the fingerprint in a pool that does
            not quantize.
        quantized: By the path of each matrix that was quantized, a `QuantizedMatrix` with its
            `relative_error` and its `largest_error`.
        failed: Engines at which the update failed, with the reason. It succeeded at another engine.
            An engine that is being recovered comes back with the new weights. Any other has none,
            and serves again after the next update.
        left: Leaves that kept their weights (strict=False).
        ignored: Names of the source that the model does not use.
        kv_bytes: Bytes of KV cache freed around the update (free_kv=True), of all engines.
    """

    weight_version: int | str
    mode: str
    strategy: str
    staging: str
    nbytes: int
    seconds: dict[str, float]
    staged: str
    engines: tuple[EngineSwap, ...]
    source: str | None = None
    quantized: dict[str, QuantizedMatrix] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    kv_bytes: int = 0

    @property
    def gb_per_sec(self) -> float:
        """10^9 bytes per second of the "stage" phase, for all engines together."""
        return self.nbytes * len(self.engines) / max(self.seconds["stage"], 1e-9) / 1e9

    def to_dict(self) -> dict[str, Any]:
        """For logs: plain numbers, words, lists and dicts."""
        return {**asdict(self), "gb_per_sec": self.gb_per_sec}
