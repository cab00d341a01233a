"""What must hold after a soak: of the outputs, of the pool and of the process around it."""

from __future__ import annotations

import gc
import signal
import statistics
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from benchmarks.span_checks import Finished
from enginepool import EnginePool

# Modes of a swap whose outputs may have several versions.
_MIXING = ("retract", "in_place")
# The message of a request that a swap aborted.
SWAP = "update_weights(mode='abort')"


# By version, the mode of its swap; by adapter, the same of the adapter's.
type Modes = Mapping[int, str]
type AdapterModes = Mapping[str, Modes]


def check_end(
    finished: Finished,
    wanted: int,
    may_end: Sequence[str],
    mode_of: Modes,
    adapters: AdapterModes | None = None,
) -> list[str]:
    """What is wrong with a request's end and with its versions.

    Args:
        wanted: Tokens.
        may_end: The messages with which the request may have been ended early.
    """
    kind, length = finished.reason["type"], len(finished.output)
    found = []
    if kind == "abort" and finished.reason.get("err_type") != "tokenizer":
        if finished.reason.get("message") not in may_end:
            found.append(f"{finished}: {finished.reason}")
    elif length != wanted:
        found.append(f"{finished}: {length} tokens of {wanted}, {finished.reason}")
    for spans, of in _both(finished, mode_of, adapters or {}):
        modes = _passed(spans[0], spans[-1], of) if spans else set()
        if not modes.issubset(_MIXING):
            found.append(f"{finished}: mixes versions over {modes}, {spans}")
    return found


def _both(
    finished: Finished, mode_of: Modes, adapters: AdapterModes
) -> list[tuple[list[Any], Modes]]:
    """Spans, and the modes of the updates between them. Of an adapter only updates that changed the
    output count: after a draining update, older outputs keep their version."""
    found = [(finished.spans, mode_of)]
    if finished.adapter is not None:
        modes = adapters[finished.adapter]
        spans = finished.lora_spans
        found.append((spans, {version: modes[version] for *_, version in spans}))
    return found


def _passed(first: list[Any], last: list[Any], mode_of: Modes) -> set[str]:
    """The modes of the updates between two spans."""
    return {mode for version, mode in mode_of.items() if first[2] < version <= last[2]}


def stopped_at(finished: Finished, stop: str, tokenizer: Any) -> int | None:
    """The number of tokens after which an output has a stop string; None without it."""
    output = finished.output
    return next(
        (n for n in range(1, len(output) + 1) if stop in _text(output[:n], tokenizer)), None
    )


def check_stop(finished: Finished, stop: str, at: int | None, tokenizer: Any) -> list[str]:
    """What is wrong where text, ids and log-probabilities should end at a stop string.

    Args:
        at: See `stopped_at`.
    """
    output, reason, found = finished.output, finished.reason, []
    if at is not None and at < len(output):
        found.append(f"said {stop!r} with token {at} of {len(output)}")
    by_string = reason["type"] == "stop" and reason["matched"] == stop
    if reason["type"] != "abort" and by_string != (at is not None):
        found.append(f"ended as {reason}, and said {stop!r} with token {at} of {len(output)}")
    entries = finished.result["meta_info"]["output_token_logprobs"]
    if [token for _, token, _ in entries] != output:
        found.append(f"{len(entries)} log-probabilities, not those of its {len(output)} tokens")
    # An output that has ended early keeps its reason where the tokenizer fails on it.
    unread = reason["type"] == "abort" and not finished.result["text"]
    if reason.get("err_type") != "tokenizer" and not unread:
        text, _, _ = _text(output, tokenizer).partition(stop)
        if finished.result["text"] != text:
            found.append(f"says {finished.result['text']!r}, its ids {text!r}")
    return [f"{finished}, stop {stop!r}: {text}" for text in found]


def _text(ids: list[int], tokenizer: Any) -> str:
    """Without special tokens, as callers get it by default."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def verifiable(
    finished: Finished, mode_of: Modes, adapters: AdapterModes | None = None
) -> Finished:
    """The output up to its first swap in place: from there on its KV cache is of other weights."""
    meta = dict(finished.result["meta_info"])
    names = "weight_versions", "lora_versions"
    for name, (spans, of) in zip(names, _both(finished, mode_of, adapters or {}), strict=False):
        ends = (
            index
            for index in range(1, len(spans))
            if "in_place" in _passed(spans[index - 1], spans[index], of)
        )
        meta[name] = spans[: next(ends, len(spans))]
    return Finished(finished.prompt, {**finished.result, "meta_info": meta})


def mixed_prompt(finished: Finished, page_size: int, adapters: AdapterModes | None = None) -> bool:
    """Whether a swap in place fell between two chunks of the prompt, by the pool's own record. The
    pool has no record for adapters. For them, whether it is possible: a prompt that is prefilled
    after others may be split after any page."""
    if finished.adapter is not None and finished.output and len(finished.prompt) > page_size:
        version = finished.lora_spans[0][2]
        if (adapters or {})[finished.adapter][version] == "in_place":
            return True
    return len(finished.result["meta_info"]["prompt_weight_versions"]) > 1


# Events of engines that failed.
FAILED = ("engine_quarantined", "engine_abandoned")
# What engines say of injected faults; see injector.py.
_INJECTED = ("Fault: ", "SystemExit: ", "NotFinite: ", "deleted", "a step has not returned")


def unexplained(events: Sequence[dict[str, Any]]) -> list[str]:
    """Engines that failed without an injected fault."""
    return [
        f"engine {event['engine']}: {event['reason']}\n{event.get('exception', '')}"
        for event in events
        if event["event"] in FAILED and not any(words in event["reason"] for words in _INJECTED)
    ]


def process() -> dict[str, Any]:
    """What a pool must leave as it was in its process."""
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "threads": sorted(
            t.name for t in threading.enumerate() if not t.name.startswith(("AnyIO", "Thread-"))
        ),
        "signal handlers": [repr(signal.getsignal(number)) for number in numbers],
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
    }


def device_bytes(pool: EnginePool) -> int:
    gc.collect()
    return pool.stats()["memory"]["sum"]["bytes_in_use"]


def recoveries(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many engines came back by a reset or a rebuild, and after how many milliseconds."""
    down: dict[int, float] = {}
    seconds: dict[str, list[float]] = {"reset": [], "rebuild": []}
    for event in events:
        if event["event"] == "engine_quarantined":
            down.setdefault(event["engine"], event["time"])
        elif event["event"] == "engine_recovered" and event["engine"] in down:
            seconds[event["by"]].append(event["time"] - down.pop(event["engine"]))
    return {f"engines back by {by}": len(times) for by, times in seconds.items()} | {
        f"median ms until then, by {by}": 1000 * statistics.median(times)
        for by, times in seconds.items()
        if times
    }


def early_ends(reasons: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many outputs ended early, by reason."""
    kinds = [reason.get("err_type", reason["type"]) for reason in reasons]
    return {
        "outputs ended by a stop string": kinds.count("stop"),
        "ended by timeouts": kinds.count("timeout"),
        "ended by aborts, of calls, swaps and pauses": kinds.count("cancelled"),
        "outputs that the tokenizer failed on": kinds.count("tokenizer"),
    }


def as_text(value: Any) -> Any:
    """A figure for a table; counts by kind as one line."""
    if isinstance(value, dict):
        return f"{sum(value.values())}: " + ", ".join(f"{n} {k}" for k, n in sorted(value.items()))
    return f"{value:.3f}" if isinstance(value, float) else value
