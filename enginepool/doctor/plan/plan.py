"""Makes a plan: the pool's `ServerArgs` for a host, and their consequences there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginepool.config import PoolConfig
from enginepool.doctor.plan.bounds import ALL_REDUCE_MS, LEFT_OUT, Layout, choose
from enginepool.errors import InvalidConfig
from enginepool.sizing import rules
from enginepool.sizing.chips import Topology, topology
from enginepool.sizing.memory import Memory
from enginepool.sizing.settings import FRACTION, Settings
from enginepool.sizing.shape import Shape, read_shape
from enginepool.values import is_int, shown


def make(
    model: str,
    host: str,
    *,
    context: int | None = None,
    batch: int = 64,
    tp_size: int = 1,
    server_args: Mapping[str, Any] | None = None,
    by_compiler: bool = False,
) -> dict[str, Any]:
    """The plan of a pool on a host, as one flat dict. Bytes are those of one chip.

    Args:
        model: A directory, a config.json or a hub id. Only its configuration is read.
        host: A topology, such as v5e-8.
        context: Tokens of a request, prompt and output. None: the checkpoint's context.
        batch: Requests in flight on the host.
        tp_size: Chips of one engine of the pool.
        by_compiler: Use the compiler's figures instead of estimates. It takes minutes, and the
            process can do nothing else meanwhile.

    Raises:
        InvalidConfig: The topology, an option or the sizes of the model are unknown, or libtpu is
            missing.
    """
    given = dict(server_args or {})
    if context is not None:
        if "context_length" in given:
            raise InvalidConfig("give context or the server argument context_length, and not both")
        given["context_length"] = context
    if not is_int(batch) or batch < 1:
        raise InvalidConfig(f"batch={shown(batch)}: expected a count of requests, 1 or more")
    where = topology(host)
    path = str(Path(model).expanduser())
    PoolConfig(path, server_args=given)  # checks the options before sizes are computed with them
    shape = read_shape(path, given)
    _check_tp(tp_size, where, shape)
    sizes = [k for k in _divisors(where.chips) if not _why_not(k, shape) or k == tp_size]
    layouts = {k: _layout(model, where, shape, batch, k, given) for k in sizes}
    notes = [where.chip.note] if where.chip.note else []
    compiled, failing = None, []
    if by_compiler:
        failing = rules.what_fails(layouts[tp_size].memory, given)
        if failing:
            notes.append(f"not compiled: {failing[0].problem}")
        else:
            layouts[tp_size], compiled = _compiled(path, where, layouts[tp_size], given)
            failing = compiled["problems"]
    mine = layouts[tp_size]
    plan = {
        "model": model,
        "topology": host,
        **_inputs(mine, where),
        **_memory(mine.memory, given),
        **_decode(mine),
        **_verdict(mine, list(layouts.values())),
        "notes": notes,
        "compiled": compiled,
    }
    return plan | ({"fits": False} if failing else {})


def _compiled(
    model: str, where: Topology, layout: Layout, given: Mapping[str, Any]
) -> tuple[Layout, dict[str, Any]]:
    """The layout with the compiler's figures, and a comparison of these with the arithmetic's."""
    from enginepool.doctor.plan.compiled import by_the_compiler, compile_steps, step_programs

    programs = compile_steps(model, where, layout, given)
    memory = replace(layout.memory, compiled=step_programs(programs))
    figures = by_the_compiler(programs, layout.memory, memory, layout.engines)
    return replace(layout, memory=memory), figures


def _layout(
    model: str, where: Topology, shape: Shape, batch: int, tp_size: int, given: Mapping[str, Any]
) -> Layout:
    config = PoolConfig(model, tp_size=tp_size, server_args=given)
    args = config.engine_args("tpu", where.chip.hbm_bytes, shape)
    memory = Memory(shape, Settings.of(args, shape), where.chip.hbm_bytes)
    return Layout(where.chip, where.chips, memory, batch)


def _divisors(chips: int) -> list[int]:
    return [size for size in range(1, chips + 1) if chips % size == 0]


def _why_not(tp_size: int, shape: Shape) -> str:
    for name, value in (("attention heads", shape.heads), ("experts", shape.experts)):
        if value % tp_size:
            return f"{value} {name} cannot be divided"
    return ""


def _check_tp(tp_size: int, where: Topology, shape: Shape) -> None:
    if tp_size not in _divisors(where.chips):
        raise InvalidConfig(
            f"tp_size={shown(tp_size)}: the {where.chips} chips of {where.name} cannot be divided; "
            f"expected one of {', '.join(map(str, _divisors(where.chips)))}"
        )
    if why := _why_not(tp_size, shape):
        raise InvalidConfig(f"tp_size={tp_size}: {why}")


def _inputs(layout: Layout, where: Topology) -> dict[str, Any]:
    shape, settings = layout.memory.shape, layout.memory.settings
    return {
        "chips": where.chips,
        "engines": layout.engines,
        "tp_size": layout.tp_size,
        "hbm_bytes": where.chip.hbm_bytes,
        "hbm_bytes_per_second": where.chip.bandwidth,
        "family": shape.family,
        "dtype": shape.dtype,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "parameters": shape.parameters,
        "context": settings.context,
        "batch": layout.batch,
        "page_size": settings.page_size,
        "mem_fraction_static": settings.fraction,
    }


def _memory(memory: Memory, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "weight_bytes": memory.weights,
        "adapter_slots": memory.settings.lora_slots,
        "adapter_slot_bytes": memory.adapter_slot,
        "adapter_bytes": memory.adapters,
        "kv_bytes_per_token": memory.kv_per_token,
        "kv_tokens": memory.kv_tokens,
        "kv_pages": memory.kv_tokens // memory.settings.page_size,
        "kv_bytes": memory.kv,
        "requests_at_context": memory.requests_at_context,
        "running_requests_cap": memory.cap,
        "max_running_requests": memory.max_running_requests,
        "prefill_temporary_bytes": memory.prefill_temporaries,
        "sampler_temporary_bytes": memory.sampler_temporaries,
        "logits_bytes": memory.logits,
        "tally_bytes": memory.tallies,
        "program_count": memory.program_count,
        "program_bytes": memory.programs,
        "reserve_bytes": memory.reserve,
        "fits": memory.serves,
        "second_weight_set_fits": memory.second_set_fits,
        "second_weight_set_fits_without_kv": memory.second_set_fits_without_kv,
        "staging": rules.staging(memory),
        "live_swap_mem_fraction_static": memory.live_swap_fraction,
        "kv_tokens_at_upstreams_fraction": memory.tokens_at(FRACTION),
        "advice": [
            entry._asdict()
            for entry in (
                *rules.advice(memory, given, defaults=True),
                *rules.page_offer(memory, given),
            )
        ],
    }


def _decode(layout: Layout) -> dict[str, Any]:
    shape = layout.memory.shape
    return {
        "running_requests": layout.running,
        "decode_weight_bytes": int(layout.weight_bytes_read(layout.least_experts)),
        "decode_kv_bytes": int(layout.kv_bytes_read),
        "decode_ms_no_faster_than": layout.decode_ms if layout.running else None,
        "decode_ms_uniform_routing": layout.uniform_ms
        if shape.experts and layout.running
        else None,
        "left_out": LEFT_OUT,
        "all_reduce_ms_assumed": ALL_REDUCE_MS,
    }


def _verdict(mine: Layout, layouts: list[Layout]) -> dict[str, Any]:
    best = choose(layouts)
    return {
        "layouts": [_row(layout) for layout in layouts],
        "recommended": None if best is None else {"tp_size": best.tp_size, "engines": best.engines},
        "verdict": _words(mine, best),
    }


def _row(layout: Layout) -> dict[str, Any]:
    memory, fits = layout.memory, bool(layout.running)
    return {
        "tp_size": layout.tp_size,
        "engines": layout.engines,
        "fits": fits,
        "kv_tokens": memory.kv_tokens * layout.engines,
        "running_requests": layout.running * layout.engines,
        "decode_ms_no_faster_than": layout.decode_ms if fits else None,
        "all_reduces": layout.all_reduces,
        "tokens_per_second_compared": round(layout.tokens_per_second),
        "second_weight_set_fits": memory.second_set_fits,
    }


def _words(mine: Layout, best: Layout | None) -> str:
    if best is None:
        return "it does not fit this host in any layout with these settings"
    shared = f"tp_size={best.tp_size} × {best.engines} engine{'s' if best.engines > 1 else ''}"
    if best.tp_size == mine.tp_size:
        return f"{shared}: no other layout of the host promises clearly more"
    if not mine.running:
        return f"does not fit at tp_size={mine.tp_size}; take {shared}"
    times = best.tokens_per_second / mine.tokens_per_second
    if best.tp_size < mine.tp_size:
        return f"take {shared}: smaller engines, and no layout promises clearly more"
    few = f"{mine.batch} requests in flight are few for a model of this size: "
    one = "a pool of several engines is the wrong choice"
    if best.engines > 1:
        one = "use fewer engines with more chips each"
    return f"{few}{one}; {shared} promises {times:.1f} times the tokens of tp_size={mine.tp_size}"
