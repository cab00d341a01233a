"""`enginepool reference kv-cycle`: the KV cache makes room for a second set of parameters."""

from __future__ import annotations

from typing import Any

from enginepool.reference.options import RunOptions
from enginepool.reference.params import nbytes
from enginepool.reference.run import Run, sha256, started
from enginepool.reference.swap import from_flax_tree, generate_beside, make_params, read_tree


def run(
    options: RunOptions,
    *,
    kv_drop_rebuild: bool,
    assert_same_output: bool,
    verify_param_sharing: bool,
) -> bool:
    """Returns whether every check held.

    Args:
        kv_drop_rebuild: Drop the KV caches before the second set of parameters is made. Otherwise
            both are in memory at the same time.
        assert_same_output: Whether a different output afterwards is a failed check.
    """
    with started("kv-cycle", options) as this:
        tree = read_tree(this)
        params = from_flax_tree(this, tree, verify=verify_param_sharing)
        first = generate_beside(this, params, keep=False)
        used = at_start = _flush(this)
        if kv_drop_rebuild:
            used = _drop(this, used)
        second_set = make_params(this, tree, "sglang_param_dict2_ready", used)
        one_set = nbytes(second_set)
        tree.clear()
        used = this.printer.phase("after_drop_mllm_params_cpu")
        if kv_drop_rebuild:
            _rebuild(this, used)
        used = _compare(this, first, must_be_same=assert_same_output)
        second_set.clear()
        freed = used - this.printer.phase("after_drop_param_dict2")
        this.printer.check_bytes(
            freed, one_set, "after_drop_param_dict2: the bytes given back are not one set"
        )
        this.printer.check_bytes(
            used - freed, at_start, "after_drop_param_dict2: memory is not as before the cycle"
        )
        return not this.printer.failed


def _flush(this: Run) -> int:
    this.pool.flush_cache()
    cached = sum(load["kv_used_tokens"] for load in this.pool.get_load())
    return this.printer.phase(
        "flush_cache_before_kv_drop", flush_cache_output={"success": not cached}
    )


def _drop(this: Run, before: int) -> int:
    this.pool.release_memory_occupation()
    info = _kv_info(this)
    # These are fields of the original scripts. A jax.Array always has `delete`, and no compiled
    # program is lost here.
    drop_info = {**info, "missing_delete_method": 0, "clear_jax_caches": False}
    dropped = this.printer.phase("kv_cache_dropped", drop_info=drop_info)
    this.printer.check_bytes(
        before - dropped,
        info["fused_bytes_total"],
        "kv_cache_dropped: the bytes given back are not the KV cache's size",
    )
    return dropped


def _rebuild(this: Run, before: int) -> None:
    this.pool.resume_memory_occupation()
    info = _kv_info(this)
    rebuilt = this.printer.phase("kv_cache_rebuilt", rebuild_info=info)
    this.printer.check_bytes(
        rebuilt - before,
        info["fused_bytes_total"],
        "kv_cache_rebuilt: the bytes taken are not the KV cache's size",
    )


def _kv_info(this: Run) -> dict[str, Any]:
    """One engine's buffers, and bytes and buffers of all engines together."""
    caches = [scheduler.kv_cache for scheduler in this.schedulers()]
    infos = [cache.describe() for cache in caches]
    info = infos[0] | {"fused_bytes_total": sum(info["fused_bytes_total"] for info in infos)}
    if caches[0].dropped:
        info["deleted_buffers"] = sum(
            info["layer_num"] for info, cache in zip(infos, caches, strict=True) if cache.dropped
        )
    return info


def _compare(this: Run, first: list[dict[str, Any]], *, must_be_same: bool) -> int:
    compiled = this.pool.stats()["executables"]["compiled"]
    second = this.generate()
    compiled = this.pool.stats()["executables"]["compiled"] - compiled
    hashes = [sha256(results[0]["text"]) for results in (first, second)]
    same = [result["text"] for result in first] == [result["text"] for result in second]
    used = this.show(
        "generate_result_after_kv_rebuild",
        second,
        text_sha256_before=hashes[0],
        same_output=int(same),
        compiled=compiled,
    )
    this.printer.determinism(same, *hashes)
    this.printer.check(
        same or not must_be_same,
        "generate_result_after_kv_rebuild: the output is another one than before",
    )
    this.printer.check(
        compiled == 0, f"generate_result_after_kv_rebuild: {compiled} programs were compiled again"
    )
    return used
