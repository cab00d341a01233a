"""What a pool and an engine can be doing."""

from enum import Enum
from typing import Literal

# What becomes of running requests when generation pauses.
PauseMode = Literal["retract", "in_place", "abort"]


class PoolState(Enum):
    """Where a pool is in its life."""

    UNOPENED = "not open yet"  # the constructor starts nothing; the first call opens
    OPEN = "open"
    CLOSED = "closed"  # for good


class EngineState(Enum):
    """What an engine is doing, in words that a person can read."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # it finishes what it has, for a swap of weights
    PAUSED = "paused"
    UNLOADED = "unloaded"  # without weights; the next update_weights loads it
    QUARANTINED = "quarantined"  # a step failed; it gets no requests
    RESETTING = "resetting"  # its scheduler state and KV cache are made anew
    REBUILDING = "rebuilding"  # all of it is made anew
    ABANDONED = "abandoned"  # a step does not return
    CLOSED = "closed"
