"""What must hold after a soak: of the outputs, of the pool and of the process around it."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from benchmarks.span_checks import Finished
from enginepool import EnginePool

# Modes of a swap whose outputs may have several versions.
_MIXING = ("retract", "in_place")
# The message of a request that a swap aborted.
SWAP = "an update of weights with mode='abort'"


# The mode of each swap of weights, by version. For adapters: by name, the mode of each update, by
# version.
type Modes = Mapping[int, str]
type AdapterModes = Mapping[str, Modes]


def check_early_end(finished: Finished, may_end: Sequence[str]) -> list[str]:
    """What is wrong with the reason of a request that was ended early.

    Args:
        may_end: The messages that its reason may have.
    """
    reason = finished.reason
    if reason.get("err_type") == "tokenizer" or reason.get("message") in may_end:
        return []
    return [f"{finished}: {reason}"]


def check_modes(
    finished: Finished, mode_of: Modes, adapters: AdapterModes | None = None
) -> list[str]:
    """Whether the output has several versions only where the modes of the updates allow it."""
    found = []
    for spans, of in _both(finished, mode_of, adapters or {}):
        modes = _passed(spans[0], spans[-1], of) if spans else set()
        if not modes.issubset(_MIXING):
            found.append(f"{finished}: mixes versions over {modes}, {spans}")
    return found


def _both(
    finished: Finished, mode_of: Modes, adapters: AdapterModes
) -> list[tuple[list[Any], Modes]]:
    """The spans of weights, with the modes of all updates, and those of the adapter, with the modes
    of some. An output keeps its adapter's version if an update drains. So an update of the adapter
    counts only if the output has its version."""
    found = [(finished.spans, mode_of)]
    if finished.adapter is not None:
        modes = adapters[finished.adapter]
        spans = finished.lora_spans
        found.append((spans, {version: modes[version] for *_, version in spans}))
    return found


def _passed(first: list[Any], last: list[Any], mode_of: Modes) -> set[str]:
    """The modes of the updates between two spans."""
    return {mode for version, mode in mode_of.items() if first[2] < version <= last[2]}


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
    """Whether a swap in place came between two chunks of the prompt.

    The pool records this for weights, and not for adapters. For an adapter it is assumed if the
    output's first version came in place and the prompt has more than a page: a prompt that is
    prefilled after others may be split after any page.
    """
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
