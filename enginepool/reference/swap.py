"""`enginepool reference swap`: running engines with dummy weights get real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from enginepool.errors import InvalidConfig
from enginepool.reference.options import RunOptions
from enginepool.reference.params import SAMPLES, nbytes, on_devices, read_flax_tree, sharing
from enginepool.reference.run import Run, started
from enginepool.runtime.swap_report import SwapReport
from enginepool.weights.checkpoint import find


def run(
    options: RunOptions, *, from_tree: bool, keep_param_dict: bool, verify_param_sharing: bool
) -> bool:
    """Returns whether every check held.

    Args:
        from_tree: Read the weights from a Flax tree on the devices, whose buffers the engines
            share. Otherwise read them from the checkpoint's files.
    """
    if not from_tree and (keep_param_dict or verify_param_sharing):
        raise InvalidConfig(
            "--keep-param-dict and --verify-param-sharing need --from flax-tree: a checkpoint's "
            "files are read into the engines, and there is no dict to share"
        )
    with started("swap", options) as this:
        if from_tree:
            params = from_flax_tree(this, read_tree(this), verify=verify_param_sharing)
            generate_beside(this, params, keep=keep_param_dict)
        else:
            directory, report = load(this)
            this.swapped("weights_swapped", report, snapshot_dir=str(directory))
            this.show("generate_result", this.generate())
        return not this.printer.failed


def load(this: Run) -> tuple[Path, SwapReport]:
    """Put a checkpoint's files into all engines; returns its directory too."""
    with this.swapping():
        directory = _find(this)
        return directory, this.pool.update_weights(directory)


def read_tree(this: Run) -> dict[str, Any]:
    """The weights as a trainer of MLLM-JAX has them, in host memory."""
    with this.swapping():
        tree = read_flax_tree(_find(this))
    this.printer.phase("mllm_params_cpu_ready", model_id=this.options.weights)
    return tree


def make_params(this: Run, tree: dict[str, Any], phase: str, before: int) -> dict[str, jax.Array]:
    """Make a set of parameters on the devices. `before` is the number of bytes in use before."""
    with this.swapping():
        params = on_devices(tree, [scheduler.leaves for scheduler in this.schedulers()])
    used = this.printer.phase(phase, num_params=len(params))
    this.printer.check_bytes(
        used, before + nbytes(params), f"{phase}: memory did not grow by one set of parameters"
    )
    return params


def from_flax_tree(this: Run, tree: dict[str, Any], *, verify: bool) -> dict[str, jax.Array]:
    """Put the tree on the devices and let the engines share its buffers."""
    params = make_params(this, tree, "sglang_param_dict_ready", this.ready_bytes)
    with this.swapping():
        report = this.pool.update_weights(params)
    this.swapped("weights_swapped_from_mllm", report)
    if verify:
        found = sharing(params, [scheduler.leaves for scheduler in this.schedulers()])
        apart = [path for path, entry in found.items() if not entry["same_object"]]
        this.printer.phase(
            "param_sharing_check",
            results={path: found[path] for path in SAMPLES if path in found},
            num_same_object=len(found) - len(apart),
            num_params=len(found),
        )
        this.printer.check(
            not apart,
            f"param_sharing_check: {len(apart)} of {len(found)} leaves are not the dict's own "
            f"buffers: {', '.join(apart[:4])} …",
        )
    return params


def generate_beside(this: Run, params: dict[str, jax.Array], *, keep: bool) -> list[dict[str, Any]]:
    """Generate with the engines' weights. `keep` keeps the dict meanwhile; otherwise it is dropped
    before."""
    phase = "before_generate_param_dict_kept" if keep else "after_cleanup"
    one_set = nbytes(params)
    if not keep:
        params.clear()
    before = this.printer.phase(phase)
    this.printer.check_bytes(
        before, this.ready_bytes, f"{phase}: memory is not what one set of weights takes"
    )
    results = this.generate()
    after = this.show("generate_result", results)
    this.printer.check(
        after < before + one_set,
        f"generate_result: memory grew by {after - before} bytes, a set of weights is {one_set}",
    )
    if keep:
        params.clear()
        dropped = this.printer.phase("after_drop_param_dict")
        this.printer.check_bytes(
            dropped, after, "after_drop_param_dict: the dict held memory of its own"
        )
    return results


def _find(this: Run) -> Path:
    """The directory of the weights, downloaded if it must be."""
    args = this.pool.engines[0].server_args
    return find(this.options.weights, args.download_dir, args.revision)
