"""Adds noise to the engines' weights, which makes an update visible."""

from __future__ import annotations

import math

import jax
import numpy as np

from enginepool.errors import InvalidRequest
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.swap_options import Options
from enginepool.runtime.swap_report import SwapReport
from enginepool.runtime.update import Update
from enginepool.runtime.update_lock import reading, updating
from enginepool.runtime.weight_inspection import of_one
from enginepool.values import is_int, is_number, plain, shown

_SEEDS = 1 << 32


def perturb_weights(runtime: Runtime, seed: int, scale: float, num_leaves: int) -> SwapReport:
    """See `EnginePool.perturb_weights`."""
    seed, scale, num_leaves = plain(seed), plain(scale), plain(num_leaves)
    if not (is_int(seed) and 0 <= seed < _SEEDS):
        raise InvalidRequest(f"seed={shown(seed)}: expected an integer from 0 to {_SEEDS - 1}")
    if not (is_number(scale) and math.isfinite(scale)):
        raise InvalidRequest(f"scale={shown(scale)}: expected a finite number")
    if not (is_int(num_leaves) and num_leaves >= 1):
        raise InvalidRequest(f"num_leaves={shown(num_leaves)}: expected a count, 1 or more")
    with updating(runtime, "perturb_weights()") as workers:
        with reading(runtime, workers[0]):
            changed = _with_noise(runtime, seed, scale, num_leaves)
        update = Update(runtime, workers, changed, Options(strict=False))
        update.prepare()
        return update.finish()


def _with_noise(
    runtime: Runtime, seed: int, scale: float, num_leaves: int
) -> dict[str, np.ndarray]:
    """The first leaves of the engines' weights, with noise added."""
    worker, arrays = of_one(runtime)
    leaves, key = worker.leaves, jax.random.key(seed)
    changed = {}
    for index, path in enumerate(list(leaves.source_specs)[:num_leaves]):
        spec = leaves.source_specs[path]
        # On the host, so that the result is the same for every device and sharding.
        drawn = np.asarray(jax.random.normal(jax.random.fold_in(key, index), spec.shape))
        host = leaves.on_host(path, arrays)
        changed[path] = (host.astype(np.float32) + drawn * scale).astype(spec.dtype)
    return changed
