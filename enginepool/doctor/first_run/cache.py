"""Whether JAX's persistent compilation cache can be used on devices above the first.

On TPU the pool keeps those devices' programs out of it (patches/compile_cache.py), because libtpu
was seen to crash when it ran one that came from the cache (jax issue 38004). Here every device uses
the cache. One process compiles and writes, another reads and runs, device after device, without a
pool. Outcomes are reported device by device, so a crash loses only the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.devices import DeviceSpec, resolve_devices
from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.compilations import cache_events, counted

_SIZE, _LAYERS = 256, 4


def check_devices(devices: DeviceSpec, checklist: Checklist, folder: Path) -> None:
    """Compile and run one program on each device, with the cache in `folder`."""
    for name, value in {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    for group in resolve_devices(devices, 1):
        checklist.run(f"device_{group[0].id}", partial(_run_on, group[0]))


def _run_on(device: jax.Device, found: Finding) -> None:
    inputs = np.linspace(-1, 1, _SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE)
    x = jax.device_put(inputs, device)
    with cache_events() as cache, counted() as programs:
        result = np.asarray(jax.jit(_program)(x))
    found.seen |= {
        "device": device.id,
        "hits": cache["hits"],
        "asked": cache["asked"],
        "xla_seconds": sum(program.seconds for program in programs),
    }
    right = bool(np.allclose(result, _by_hand(inputs), rtol=0.02, atol=0.02))
    found.seen["right"] = right
    found.expect(right, "the result is not NumPy's")


def _program(x: jax.Array) -> jax.Array:
    """Matrix products in a loop, as in a model; large enough that XLA has something to do."""

    def layer(carry: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ x / _SIZE), None

    return jax.lax.scan(layer, x, None, length=_LAYERS)[0]


def _by_hand(x: np.ndarray) -> np.ndarray:
    carry = x
    for _ in range(_LAYERS):
        carry = np.tanh(carry @ x / _SIZE)
    return carry


def conclude(
    written: Sequence[dict[str, Any]], read: Sequence[dict[str, Any]], found: Finding
) -> None:
    """One finding from the outcomes of the two processes.

    The check answers a question. So "programs of devices above the first are not read from the
    cache" and "it crashes" are answers. Only the first device must work. What happened to a process
    itself is in `written` and `read`.
    """
    found.seen["written"] = [_short(outcome) for outcome in written]
    found.seen["read"] = [_short(outcome) for outcome in read]
    devices = [outcome for outcome in read if outcome["check"].startswith("device_")]
    found.seen["hits_by_device"] = {
        outcome["check"].removeprefix("device_"): outcome.get("seen", {}).get("hits", 0)
        for outcome in devices
    }
    taken = [outcome["status"] == "ok" and bool(outcome["seen"]["hits"]) for outcome in devices]
    above = taken[1:]
    found.seen["taken_by_devices_above_the_first"] = all(above) if above else None
    for what, outcomes in (("write", written), ("read", read)):
        first = outcomes[0] if outcomes else {"status": "skipped", "problems": ["no device"]}
        found.expect(
            first["status"] == "ok",
            f"the first device could not {what}: {' '.join(first.get('problems', []))}",
        )
    found.expect(
        not taken or taken[0] or read[0]["status"] != "ok",
        "the first device did not find its own program in the cache",
    )


def _short(outcome: dict[str, Any]) -> dict[str, Any]:
    return {name: outcome[name] for name in ("status", "seen", "problems") if name in outcome}
