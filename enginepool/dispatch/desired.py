"""What every engine of a pool is to be like."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginepool.dispatch.condition import PauseReason


@dataclass
class DesiredState:
    """Changed while a pause, a swap or the like has its turn; read from anywhere. An engine that
    failed comes back to it.

    Attributes:
        weight_version: The label of the weights.
        update: The number of the update that brought them; 0 is the checkpoint.
        no_weights: Why no engine has weights, if that was asked for.
        pause_reasons: Why no engine takes a step.
    """

    weight_version: int | str = 0
    update: int = 0
    no_weights: str | None = None
    pause_reasons: set[PauseReason] = field(default_factory=set)
