"""One sglang-jax engine on each accelerator device of a host, in one process, used as one."""

from enginepool.errors import (
    EnginePoolError,
    EnginesDiffer,
    EngineStartFailed,
    ForkedProcess,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    NotFinite,
    NoWeights,
    PatchFailed,
    PoolClosed,
    PoolFailed,
    QueueFull,
    RequestFailed,
    RequestsFailed,
    StepTimeout,
    WeightUpdateFailed,
)
from enginepool.pool.pool import EnginePool
from enginepool.swap.report import SwapReport

__all__ = [
    "EnginePool",
    "EnginePoolError",
    "EngineStartFailed",
    "EnginesDiffer",
    "ForkedProcess",
    "InvalidConfig",
    "InvalidRequest",
    "InvalidWeights",
    "NoWeights",
    "NotFinite",
    "PatchFailed",
    "PoolClosed",
    "PoolFailed",
    "QueueFull",
    "RequestFailed",
    "RequestsFailed",
    "StepTimeout",
    "SwapReport",
    "WeightUpdateFailed",
]
