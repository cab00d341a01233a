"""Programs that are compiled or loaded, and for which device, by JAX's own events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


class Program(NamedTuple):
    """
    Attributes:
        device: The id of the default device of the thread that compiled it. On an engine's thread
            it is the engine's device. None on a thread without a default device.
        seconds: The seconds that XLA took to compile it, or to load it.
    """

    device: int | None
    seconds: float


@contextmanager
def counted() -> Iterator[list[Program]]:
    """Every program that is compiled or loaded in the block, on any thread."""
    programs: list[Program] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            programs.append(Program(_default_device(), duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def cache_events() -> Iterator[dict[str, int]]:
    """How often the persistent cache was asked in the block, and how often it had the program."""
    counts = {"asked": 0, "hits": 0}

    def listen(event: str, **_: Any) -> None:
        for name, wanted in (("asked", _ASKED), ("hits", _HIT)):
            counts[name] += event == wanted

    jax.monitoring.register_event_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _default_device() -> int | None:
    config: Any = jax.config  # its attributes are made at run time
    return getattr(config.jax_default_device, "id", None)
