"""Patches for defects of the installed sglang-jax: one module per defect.

Importing this package changes nothing and imports neither jax nor sgl_jax.

    applied = patches.apply()   # those that the installed upstream needs
    ...
    patches.revert(applied)

Some patches are optimisations: they only make a step faster. With ENGINEPOOL_OPTIMISATIONS=0 in the
environment `apply()` leaves them out.

Apply before the first engine is built: programs that JAX has compiled stay as they are. Both
functions can be called from any thread, and repeatedly.
"""

import os
from collections.abc import Sequence

from patches import (
    _patch,
    batch_dependence,
    batch_transfers,
    compile_cache,
    end_id_zero,
    end_ids_not_banned,
    expert_statistics,
    import_side_effects,
    int8_truncation,
    llama3_rotary,
    metadata_check,
    min_p,
    min_p_ignored,
    penalties_after_retract,
    quantized_input,
    request_seed,
    resumed_reservation,
    rotary_precision,
    rotary_scaling,
    seeded_sampler,
    shared_config,
    signal_handlers,
    stop_strings,
    tokenizers_backend,
    top_p_order,
    unused_sockets,
    v4_block_sizes,
    zero_penalty_cache,
)
from patches._patch import Patch, PatchError, is_applied
from patches._table import table

__all__ = [
    "ALL",
    "Patch",
    "PatchError",
    "apply",
    "is_applied",
    "needed",
    "optimising",
    "revert",
    "table",
]

ALL: tuple[Patch, ...] = (
    # First: it imports, quietly, what the others patch.
    import_side_effects.PATCH,
    signal_handlers.PATCH,
    compile_cache.PATCH,
    zero_penalty_cache.PATCH,
    request_seed.PATCH,
    seeded_sampler.PATCH,
    top_p_order.PATCH,
    min_p.PATCH,
    min_p_ignored.PATCH,
    batch_dependence.PATCH,
    penalties_after_retract.PATCH,
    end_ids_not_banned.PATCH,
    stop_strings.PATCH,
    resumed_reservation.PATCH,
    end_id_zero.PATCH,
    shared_config.PATCH,
    tokenizers_backend.PATCH,
    expert_statistics.PATCH,
    unused_sockets.PATCH,
    rotary_precision.PATCH,
    llama3_rotary.PATCH,
    rotary_scaling.PATCH,
    quantized_input.PATCH,
    int8_truncation.PATCH,
    v4_block_sizes.PATCH,
    batch_transfers.PATCH,
    metadata_check.PATCH,
)


def needed() -> list[Patch]:
    """Return the patches whose defect the installed upstream has, applied or not."""
    return [patch for patch in ALL if patch.is_needed()]


def optimising() -> bool:
    """Tell whether the environment allows optimisations."""
    return os.environ.get("ENGINEPOOL_OPTIMISATIONS") != "0"


def apply(patches: Sequence[Patch] | None = None) -> list[Patch]:
    """Apply patches that are needed and not yet applied.

    Args:
        patches: By default all, or all but optimisations if the environment has
            ENGINEPOOL_OPTIMISATIONS=0.

    Returns:
        Those that this call applied.

    Raises:
        PatchError: A target is missing or has changed in upstream. What this call applied is
            reverted.
    """
    if patches is None:
        fast = optimising()
        patches = [patch for patch in ALL if fast or not patch.optimisation]
    return _patch.apply(patches)


def revert(patches: Sequence[Patch] | None = None) -> None:
    """Put back the very objects that upstream had. The patch that was applied last goes first.

    Args:
        patches: By default all. Patches that are not applied are skipped.

    Raises:
        PatchError: Someone replaced a target again. That patch and those before it stay.
    """
    _patch.revert(ALL if patches is None else patches)
