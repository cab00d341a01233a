"""One sglang-jax engine on each accelerator device of a host, in one process, used as one."""

from typing import TYPE_CHECKING

# structlog imports rich, which draws a number from `random`. Importing structlog here keeps that
# draw out of the middle of a user's program.
import enginepool.logs as _logs  # noqa: F401
from enginepool.errors import (
    EnginePoolError,
    EnginesDiffer,
    EngineStartFailed,
    ForkedProcess,
    InvalidConfig,
    InvalidGrammar,
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
    StaleWeights,
    StepTimeout,
    WeightUpdateFailed,
)

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool
    from enginepool.runtime.adapters import AdapterReport
    from enginepool.runtime.staged_adapter import StagedAdapter
    from enginepool.runtime.staged_weights import StagedWeights
    from enginepool.runtime.swap_report import SwapReport

__all__ = [
    "AdapterReport",
    "EnginePool",
    "EnginePoolError",
    "EngineStartFailed",
    "EnginesDiffer",
    "ForkedProcess",
    "InvalidConfig",
    "InvalidGrammar",
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
    "StagedAdapter",
    "StagedWeights",
    "StaleWeights",
    "StepTimeout",
    "SwapReport",
    "WeightUpdateFailed",
]


def __getattr__(name: str) -> object:
    """Import what needs JAX on first use, so that `enginepool --help` does not import JAX."""
    if name == "EnginePool":
        from enginepool.pool.pool import EnginePool as found
    elif name == "AdapterReport":
        from enginepool.runtime.adapters import AdapterReport as found
    elif name == "StagedAdapter":
        from enginepool.runtime.staged_adapter import StagedAdapter as found
    elif name == "StagedWeights":
        from enginepool.runtime.staged_weights import StagedWeights as found
    elif name == "SwapReport":
        from enginepool.runtime.swap_report import SwapReport as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
