"""One sglang-jax engine on each accelerator device of a host, in one process, used as one."""

from enginepool.errors import (
    EnginePoolError,
    EngineStartFailed,
    InvalidConfig,
    InvalidRequest,
    PoolClosed,
    PoolFailed,
    RequestFailed,
    RequestsFailed,
)
from enginepool.pool import EnginePool

__all__ = [
    "EnginePool",
    "EnginePoolError",
    "EngineStartFailed",
    "InvalidConfig",
    "InvalidRequest",
    "PoolClosed",
    "PoolFailed",
    "RequestFailed",
    "RequestsFailed",
]
