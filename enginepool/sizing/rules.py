"""The pool's defaults on a TPU, and advice about other settings. docs/tpu.md has the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from enginepool.sizing.memory import Memory, running_requests_cap
from enginepool.values import is_int

# Upstream's default of 1 does not work: the attention kernel unrolls a copy for every page of a
# block.
PAGE_SIZE = 128
LEAST_PAGE_SIZE = 16
# Shares shorter prefixes, and compiles as fast (docs/tpu.md has the figures).
SHARING_PAGE_SIZE = 32
# Without a limit upstream compiles for thousands of requests, and the sampler needs several times
# the logits of all of them. This is the largest of upstream's batch buckets.
MAX_RUNNING_REQUESTS = 256

TPU_DEFAULTS: Mapping[str, Any] = {
    "page_size": PAGE_SIZE,
    "max_running_requests": MAX_RUNNING_REQUESTS,
}


class Advice(NamedTuple):
    """A problem of some settings, and its remedy."""

    problem: str
    remedy: str


def page_advice(args: Mapping[str, Any]) -> list[Advice]:
    """Problems of the page size, for any model."""
    page: Any = args.get("page_size")
    if not is_int(page) or page >= LEAST_PAGE_SIZE:
        return []
    return [
        Advice(
            f"page_size={page}: below {LEAST_PAGE_SIZE} a TPU's attention kernel unrolls a copy "
            "for every page of a block, and a program takes minutes to compile",
            f"leave page_size out ({PAGE_SIZE} on a TPU), or give {LEAST_PAGE_SIZE} or more",
        )
    ]


def page_offer(memory: Memory, args: Mapping[str, Any]) -> list[Advice]:
    """Suggests smaller pages for short prompts, if the user has not chosen a page size."""
    context, running = memory.settings.context, memory.max_running_requests
    if (
        args.get("page_size") is not None
        or memory.settings.page_size <= SHARING_PAGE_SIZE
        or running_requests_cap(context, SHARING_PAGE_SIZE) < running
    ):
        return []
    return [
        Advice(
            f"page_size={memory.settings.page_size}: samples of one prompt share only whole pages, "
            "so each sample of a shorter prompt is prefilled by itself",
            f"if prompts are short: page_size={SHARING_PAGE_SIZE}; programs compile as fast for "
            "a v5e, but its kernel copies four times as many pages a block, and nobody has "
            "measured what that costs on a TPU",
        )
    ]


def what_fails(memory: Memory, args: Mapping[str, Any]) -> list[Advice]:
    """Problems that keep an engine from starting or serving on a TPU.

    Args:
        args: The user's options, without defaults.
    """
    found = page_advice(args)
    settings = memory.settings
    context, page, cap = settings.context, settings.page_size, memory.cap
    asked = args.get("max_running_requests")
    if cap < (1 if asked is None else asked):
        larger = f"page_size={PAGE_SIZE} allows {running_requests_cap(context, PAGE_SIZE)}"
        found.append(
            Advice(
                f"max_running_requests={asked or settings.max_running_requests}: upstream's "
                f"attention runs at most {cap} at context_length={context} and page_size={page} "
                f"(524,288 // {settings.pages_per_request} pages // 4)",
                f"a smaller context_length; {larger}"
                if page < PAGE_SIZE
                else "a smaller context_length",
            )
        )
    # Without running requests the sizes of programs mean nothing.
    if not memory.serves and (cap or not memory.requests_at_context):
        found.append(_does_not_fit(memory))
    return found


def advice(memory: Memory, args: Mapping[str, Any], *, defaults: bool = False) -> list[Advice]:
    """Problems of settings on a TPU, before an engine is built. `args` as in `what_fails`.

    Args:
        defaults: Also say what the defaults mean for `update_weights`.
    """
    found = what_fails(memory, args)
    asked = defaults or args.get("mem_fraction_static") is not None
    if asked and memory.serves and not memory.second_set_fits:
        found.append(staging_advice(memory))
    return found


def staging(memory: Memory) -> str:
    """The staging of `update_weights`: "double" while engines serve, or "stream"."""
    return "double" if memory.second_set_fits else "stream"


def staging_advice(memory: Memory) -> Advice:
    """Explains why a second weight set does not fit, and how it would."""
    settings, live = memory.settings, memory.live_swap_fraction
    sets = 2 * memory.weights / 1e9
    remedies = []
    if live is not None and live < settings.fraction:
        tokens = memory.tokens_at(live)
        remedies.append(f"mem_fraction_static={live:g} has room for both and {tokens} KV tokens")
    if memory.second_set_fits_without_kv:
        remedies.append("update_weights(free_kv=True) releases the KV cache and has room for both")
    return Advice(
        f"mem_fraction_static={settings.fraction:g}: a second weight set does not fit beside the "
        f"KV cache ({sets:.2f} GB of weights, {memory.kv / 1e9:.2f} of KV, "
        f"{memory.reserve / 1e9:.2f} of programs and temporaries, in {memory.free / 1e9:.2f})",
        "; or ".join(
            [
                'update_weights stops the engines and replaces leaf by leaf (staging="stream")',
                *remedies,
            ]
        ),
    )


def _does_not_fit(memory: Memory) -> Advice:
    settings, free = memory.settings, memory.free / 1e9
    weights, reserve = memory.weights / 1e9, memory.reserve / 1e9
    least, most = memory.least_fraction, memory.largest_fraction(sets=1)
    if not memory.requests_at_context:
        larger = "a larger tp_size, a smaller context_length, or a chip with more HBM"
        if least is not None and most is not None and least <= most:
            larger = f"mem_fraction_static={least:g} to {most:g}, or {larger}"
        return Advice(
            f"{memory.kv_tokens} KV tokens at mem_fraction_static={settings.fraction:g} "
            f"({weights:.2f} GB of weights in {free:.2f}) are less than one request of "
            f"context_length={settings.context} needs",
            larger,
        )
    smaller = "a smaller mem_fraction_static"
    if most is not None:
        smaller += f" (at most {most:g})"
    return Advice(
        f"mem_fraction_static={settings.fraction:g} leaves too little for programs and "
        f"temporaries, about {reserve:.2f} of {free:.2f} GB",
        f"{smaller}, max_running_requests or chunked_prefill_size",
    )
