"""Pools of the toy: on all devices with every check, or one engine with other options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from enginepool.console.output import engine_line
from enginepool.devices import DeviceSpec, resolve_devices
from enginepool.doctor.first_run import goldens, load, memory
from enginepool.doctor.first_run.checklist import Checklist, Finding, describe
from enginepool.doctor.first_run.compilations import Program, counted
from enginepool.errors import EngineStartFailed, InvalidConfig
from enginepool.pool.pool import EnginePool

# One shape of prefill and one of decode, so that compiling leaves time for the rest.
SERVER_ARGS: dict[str, Any] = {
    "context_length": 512,
    "max_running_requests": load.BATCH,
    "max_total_tokens": 2048,
    "max_prefill_tokens": 256,
    "chunked_prefill_size": 256,
    "precompile_token_paddings": [256],
    "precompile_bs_paddings": [load.BATCH],
}
# A step of the toy takes milliseconds.
STEP_SECONDS = 60.0

# The checks in order, each with the seconds that must be left to begin it.
CHECKS: dict[str, tuple[Callable[[EnginePool, Finding], None], float]] = {
    "goldens_alone": (goldens.alone, 5.0),
    "goldens_together": (goldens.together, 5.0),
    "long_output": (goldens.long, 20.0),
    "wall_over_slowest": (load.wall, 15.0),
    "step": (load.step, 10.0),
    "swap": (memory.swap, 15.0),
    "kv_cycle": (memory.kv_cycle, 10.0),
    "idle": (load.idle, 5.0),
}
NAMES = ("build", *CHECKS, "engines")
_EVENT = ("event", "engine", "reason", "exception")  # the fields of an event that the report has


def check_pool(devices: DeviceSpec, checklist: Checklist, say: Callable[[str], None]) -> None:
    """Build engines on all devices and run every check.

    If the engine of one device does not start, the others are built once more without it.
    """
    pools: list[EnginePool] = []

    def build(wanted: DeviceSpec, found: Finding) -> None:
        pools.append(opened(wanted, found, say))

    def again(found: Finding) -> None:
        build(_others(devices, failed), found)

    failed: list[int] = []

    def first(found: Finding) -> None:
        try:
            build(devices, found)
        except EngineStartFailed as error:
            failed.extend(error.device_ids)
            raise

    checklist.run("build", first)
    if failed and _others(devices, failed):
        say(f"once more without device {failed}")
        checklist.run("build_without_failed", again)
    if not pools:
        for name in NAMES[1:]:
            checklist.skip(name, "no pool could be opened")
        return
    with pools[0] as pool:
        check_open_pool(pool, checklist)


def check_open_pool(pool: EnginePool, checklist: Checklist) -> None:
    """Run every check that needs an open pool."""
    for name, (check, needs) in CHECKS.items():
        checklist.run(name, partial(check, pool), needs)
    checklist.run("engines", partial(engines, pool))


def check_variant(
    devices: DeviceSpec,
    name: str,
    options: dict[str, Any],
    checklist: Checklist,
    say: Callable[[str], None],
) -> None:
    """Build one engine with these options on the first device. Check sums and a long output."""
    first = devices[:1] if isinstance(devices, Sequence) else 1

    def check(found: Finding) -> None:
        try:
            pool = opened(first, found, say, **options)
        except InvalidConfig as error:
            if not any(f"{option}=" in str(error) for option in options):
                raise  # the error is not about these options
            found.seen |= {"taken": False, "why": describe(error)}
            return
        with pool:
            found.seen["taken"] = True
            found.problems += memory.answers(pool, "add")
            goldens.long(pool, found)

    checklist.run(name, check)


def opened(
    devices: DeviceSpec, found: Finding, say: Callable[[str], None], **options: Any
) -> EnginePool:
    """An open pool of the toy. `found` gets the build times of its engines, even if one fails."""
    entries = found.seen["engines"] = []
    # An engine that fails is not brought back, so that the failure is visible.
    settings = {"restart": False, "step_timeout": STEP_SECONDS, **SERVER_ARGS, **options}
    pool = EnginePool(devices=devices, **settings)
    with counted() as programs:

        def on_engine(engine: dict[str, Any]) -> None:
            entries.append(_built(engine, programs))
            say(engine_line(engine))

        pool.open(on_engine=on_engine)
    # The pool compiles ahead for updates. Checks would count these programs as compiled to serve.
    pool.runtime.swap_programs.join()
    args: Any = pool.engines[0].server_args
    names = ("page_size", "dtype", "attention_backend", "mem_fraction_static", *SERVER_ARGS)
    found.seen["server_args"] = {name: getattr(args, name, None) for name in names}
    found.seen["executables"] = pool.stats()["executables"]
    client: Any = jax.local_devices()[0].client
    found.seen["platform_version"] = client.platform_version
    return pool


def _built(engine: dict[str, Any], programs: list[Program]) -> dict[str, Any]:
    device = engine["devices"][0]
    seconds = [program.seconds for program in programs if program.device == device]
    return {
        "engine_index": engine["engine_index"],
        "device": device,
        "build_seconds": engine["build_seconds"],
        "warmup_seconds": engine["warmup_seconds"],
        "programs": len(seconds),
        "xla_seconds": sum(seconds),
        "kv_tokens": engine["kv_total_tokens"],
    }


def engines(pool: EnginePool, found: Finding) -> None:
    """The state of the engines after all checks, and what their devices hold."""
    states = pool.stats()
    found.seen["states"] = [engine["state"] for engine in states["engines"]]
    found.seen["memory"] = states["memory"]
    found.seen["events"] = [
        {name: event[name] for name in _EVENT if name in event} for event in pool.events()
    ]
    for engine in states["engines"]:
        found.expect(
            engine["state"] == "serving",
            f"engine {engine['engine_index']}: {engine['state']}, {engine['reason']}",
        )


def _others(devices: DeviceSpec, failed: list[int]) -> list[jax.Device]:
    everything = itertools.chain.from_iterable(resolve_devices(devices, 1))
    return [device for device in everything if device.id not in failed]
