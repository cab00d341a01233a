"""Prints a plan for people: its inputs, then every figure with its terms."""

from __future__ import annotations

from typing import Any


def show(plan: dict[str, Any]) -> None:
    """Print the plan."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for title, lines in (
        ("Inputs", _inputs(plan)),
        ("HBM of one chip", _memory(plan)),
        *([("By the compiler", _compiled(plan))] if plan["compiled"] else []),
        ("New weights", _swap(plan)),
        ("A decode step", _decode(plan)),
    ):
        console.print(title, style="bold")
        width = max(map(len, lines))
        for name, text in lines.items():
            console.print(f"  {name:{width}}  {text}")
    names = ("tp_size", "engines", "KV tokens", "requests", "ms a step", "all-reduces", "tokens/s")
    table = Table(*names, "fits", box=None)
    for row in plan["layouts"]:
        least = row["decode_ms_no_faster_than"]
        table.add_row(
            *(str(row[name]) for name in ("tp_size", "engines", "kv_tokens", "running_requests")),
            "" if least is None else f"{least:.2f}",
            str(row["all_reduces"]),
            str(row["tokens_per_second_compared"]),
            "yes" if row["fits"] else "no",
        )
    console.print("Layouts of this host", style="bold")
    console.print(table)
    console.print(
        f"  a bound leaves out {plan['left_out']}; tokens/s only compares layouts and assumes "
        f"{1000 * plan['all_reduce_ms_assumed']:g} µs for an all-reduce"
    )
    console.print("Verdict", style="bold")
    console.print(f"  {plan['verdict']}")
    for note in plan["notes"]:
        console.print(f"  {note}")
    for entry in plan["advice"]:
        console.print(f"  {entry['problem']}\n    → {entry['remedy']}")


def _inputs(plan: dict[str, Any]) -> dict[str, str]:
    hbm, speed = plan["hbm_bytes"], plan["hbm_bytes_per_second"] / 1e9
    return {
        "model": f"{plan['model']}: {plan['family']}, {plan['parameters']:,} parameters",
        "dtype": plan["dtype"],
        "host": f"{plan['topology']}: {plan['chips']} chips, each {hbm:,} bytes of HBM at "
        f"{speed:,.0f} GB/s",
        "pool": f"engines: {plan['engines']}, chips of each (tp_size): {plan['tp_size']}",
        "context": f"{plan['context']:,} tokens a request",
        "batch": f"{plan['batch']:,} requests in flight on the host",
        "page_size": str(plan["page_size"]),
        "mem_fraction_static": f"{plan['mem_fraction_static']:g}",
    }


def _memory(plan: dict[str, Any]) -> dict[str, str]:
    return {**_weights_and_kv(plan), **_beside_them(plan)}


def _weights_and_kv(plan: dict[str, Any]) -> dict[str, str]:
    pages = -(-plan["context"] // plan["page_size"])
    return {
        "weights": _bytes(plan["weight_bytes"]),
        **_adapters(plan),
        "KV a token": f"{plan['kv_bytes_per_token']:,} bytes: 2 × {plan['layers']} layers × KV "
        "heads of a chip × head width in steps of 128 × bytes a value",
        "KV tokens": f"{plan['kv_tokens']:,} in {plan['kv_pages']:,} pages: (HBM × "
        "mem_fraction_static - weights and adapters) / KV a token, in whole pages",
        "KV": f"{_bytes(plan['kv_bytes'])}: these tokens and one page more",
        "requests of that context": f"{plan['requests_at_context']:,} have room at a time",
        "running requests": f"{plan['max_running_requests']:,} at most; upstream's attention caps "
        f"them at {plan['running_requests_cap']:,} = 524,288 // {pages} pages // 4",
    }


def _adapters(plan: dict[str, Any]) -> dict[str, str]:
    if not (slots := plan["adapter_slots"]):
        return {}
    each, whole = plan["adapter_slot_bytes"] / 1e6, plan["adapter_bytes"]
    size = f"{_bytes(whole)}: {slots} slots of {each:,.0f} MB"
    share = f"{whole / plan['weight_bytes']:.1%}"
    return {"adapters": f"{size}; a step with adapters reads {share} more, others none of it"}


def _beside_them(plan: dict[str, Any]) -> dict[str, str]:
    each = "" if plan["compiled"] else " of 23 MB at most each"
    prefill, sampler = plan["prefill_temporary_bytes"], plan["sampler_temporary_bytes"]
    whole = plan["weight_bytes"] + plan["adapter_bytes"] + plan["kv_bytes"] + plan["reserve_bytes"]
    fits = "fits" if plan["fits"] else "does not fit"
    return {
        "programs": f"{_bytes(plan['program_bytes'])}: {plan['program_count']} forward "
        f"programs{each}",
        "logits": _bytes(plan["logits_bytes"]),
        "temporaries": f"prefill {_bytes(prefill)}, sampler {_bytes(sampler)}; the larger counts",
        "in all": f"{_bytes(whole)} of {_bytes(plan['hbm_bytes'])}: {fits}",
    }


def _compiled(plan: dict[str, Any]) -> dict[str, str]:
    found = plan["compiled"]

    def beside(name: str) -> str:
        return f"{_bytes(found[name])}; by arithmetic {_bytes(found[f'{name}_by_arithmetic'])}"

    lines = {
        "arguments": f"{beside('argument_bytes')}: weights, KV and a batch's numbers",
        "beside them": f"{beside('reserve_bytes')}: programs, logits, temporaries",
        "in all": beside("memory_bytes"),
        "decode's temporaries": _bytes(found["decode_temporary_bytes"]),
        "start-up": f"{found['startup_cpu_seconds']:,.0f} CPU seconds: {found['programs']} "
        f"programs of a step in {found['cpu_seconds_of_an_engine']:,.0f} here, × "
        f"{plan['engines']} engines, which share none",
    }
    numbered = enumerate(found["problems"], 1)
    return lines | {f"problem {number}": text for number, text in numbered}


def _swap(plan: dict[str, Any]) -> dict[str, str]:
    live = plan["live_swap_mem_fraction_static"]
    without_kv = plan["second_weight_set_fits_without_kv"]
    return {
        "staging": plan["staging"],
        "second set beside KV": "fits" if plan["second_weight_set_fits"] else "does not fit",
        "with the KV released": "fits" if without_kv else "does not fit",
        'staging="double" up to': "none" if live is None else f"mem_fraction_static={live:g}",
        "KV by upstream's default": f"{plan['kv_tokens_at_upstreams_fraction']:,} tokens at "
        "mem_fraction_static=0.88",
    }


def _decode(plan: dict[str, Any]) -> dict[str, str]:
    if not plan["running_requests"]:
        return {"requests": "none: it does not fit"}
    least, uniform = plan["decode_ms_no_faster_than"], plan["decode_ms_uniform_routing"]
    weights, kv = plan["decode_weight_bytes"], plan["decode_kv_bytes"]
    lines = {
        "requests": f"{plan['running_requests']:,} in one engine's step",
        "no faster than": f"{least:.2f} ms: ({_bytes(weights)} of weights + {_bytes(kv)} of KV) / "
        "bandwidth",
    }
    if uniform is not None:
        lines["with uniform routing"] = f"{uniform:.2f} ms: every expert equally probable"
    return lines


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
