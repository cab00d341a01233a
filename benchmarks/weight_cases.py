"""The sources of a weight update, each with plain JAX for the same bytes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.synthetic import tensors
from benchmarks.weight_peers import Leaves, convert, gather, put
from enginepool import EnginePool, InvalidConfig, SwapReport
from enginepool.devices import resolve_devices


@dataclass(frozen=True)
class Case:
    """A source and its peer.

    Attributes:
        make: Makes the source.
        sets: How many engines get weights that are not on their device.
        peer: Takes the source and makes as many sets on the same devices. None if nothing moves.
    """

    name: str
    make: Callable[[], Any]
    sets: int
    peer: Callable[[Any], Any] | None


def cases(
    directory: Path, devices: Sequence[jax.Device], other: jax.Device, *, every: bool = False
) -> list[Case]:
    """Every kind of source.

    Args:
        devices: The engines', one each.
        other: The trainer's device. An engine's only if there is no other.
        every: Also an nnx.State, and a source in another dtype than the engines'.
    """
    count, own = len(devices), functools.partial(own_layout, directory)
    found = [
        _own_layout_case("own layout, on another device", own, devices, other),
        _own_layout_case("own layout, on an engine's device", own, devices, devices[0]),
        Case("own layout, on every device", lambda: _over(own(devices[0]), devices), 0, None),
        Case(
            "own layout, sharded over every device",
            lambda: _over(own(devices[0]), devices, cut=True),
            count,
            functools.partial(gather, devices=devices),
        ),
        Case(
            "HF names, on an engine's device",
            lambda: {name: jax.device_put(array, devices[0]) for name, array in tensors(directory)},
            count,
            lambda source: convert(source.items(), devices),
        ),
        Case(
            "HF names, NumPy",
            lambda: dict(tensors(directory)),
            count,
            lambda source: convert(source.items(), devices),
        ),
        Case(
            "HF names, safetensors",
            lambda: directory,
            count,
            lambda source: convert(tensors(source), devices, private=True),
        ),
    ]
    if every:
        found += _further_cases(directory, devices)
    # With one engine or without another device some are the same.
    return found if other not in devices and count > 1 else [found[0], *found[4:]]


def _further_cases(directory: Path, devices: Sequence[jax.Device]) -> list[Case]:
    def state(device: jax.Device) -> nnx.State:
        leaves = own_layout(directory, device).items()
        flat: dict[Any, Any] = {_nnx_path(path): nnx.Param(leaf) for path, leaf in leaves}
        return nnx.from_flat_state(flat)

    return [
        _own_layout_case("nnx.State, on an engine's device", state, devices, devices[0]),
        Case(
            "HF names, on an engine's device, cast",
            lambda: {
                name: jax.device_put(array, devices[0]).astype(jnp.bfloat16)
                for name, array in tensors(directory)
            },
            len(devices),
            lambda source: convert(source.items(), devices, dtype=jnp.float32),
        ),
    ]


def devices_and_another(engines: int) -> tuple[list[jax.Device], jax.Device]:
    """A device for each engine, and one for the trainer: an engine's if there is no other."""
    try:
        *groups, (other,) = resolve_devices(engines + 1, 1)
    except InvalidConfig:
        groups = resolve_devices(engines, 1)
        (other,) = groups[-1]
    return [device for (device,) in groups], other


def own_layout(directory: Path, device: jax.Device) -> Leaves:
    """The checkpoint's weights by leaf path, in the model's layout."""
    return convert(tensors(directory), [device], private=True)[0]


def measure(pool: EnginePool, case: Case, rounds: int) -> dict[str, Any]:
    """Ours and the peer in turn, on an idle pool. The first round compiles and does not count."""
    source = case.make()
    runs = [_round(pool, case, source, number) for number in range(rounds + 1)][1:]

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    row: dict[str, Any] = {
        key: median(key) for key in runs[0] if key not in ("fingerprint", "peer")
    }
    row |= {
        "name": case.name,
        "gb": case.sets * runs[0]["nbytes"] / 1e9,
        "fingerprint": runs[0]["fingerprint"],
        "runs": runs,
    }
    if case.peer is not None:
        row["peer"] = median("peer")
        row["of_peer"] = row["peer"] / row["ours"]
        row["gb_per_sec"] = row["gb"] / row["ours"]
    return row


def _nnx_path(path: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else part for part in path.split("."))


def _own_layout_case(
    name: str,
    own: Callable[[jax.Device], Any],
    devices: Sequence[jax.Device],
    holder: jax.Device,
) -> Case:
    receivers = [device for device in devices if device != holder]
    peer = functools.partial(put, devices=receivers) if receivers else None
    return Case(name, lambda: own(holder), len(receivers), peer)


def _over(leaves: Leaves, devices: Sequence[jax.Device], *, cut: bool = False) -> Leaves:
    """Leaves on all of these devices: whole, or cut along the largest axis that can be (FSDP)."""
    mesh = Mesh(np.array(devices), ("all",))

    def sharding(leaf: jax.Array) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % len(devices) == 0]
        if not cut or not axes:
            return NamedSharding(mesh, PartitionSpec())
        largest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * largest, "all"))

    return {path: jax.device_put(leaf, sharding(leaf)) for path, leaf in leaves.items()}


def _round(pool: EnginePool, case: Case, source: Any, number: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}

    def ours() -> None:
        figures.update(_phases(pool.update_weights(source, staging="double")))

    def peer(make: Callable[[Any], Any]) -> None:
        started = time.perf_counter()
        made = make(source)
        figures["peer"] = time.perf_counter() - started
        del made

    jobs = [ours] if case.peer is None else [ours, functools.partial(peer, case.peer)]
    # In turn, because each finds the host as the other left it.
    for job in jobs if number % 2 else reversed(jobs):
        job()
    return figures


def _phases(report: SwapReport) -> dict[str, Any]:
    seconds = report.seconds
    return {
        "ours": seconds["stage"] + seconds["commit"],
        "stage": seconds["stage"],
        "commit": seconds["commit"],
        "quiesce": seconds["quiesce"],
        "verify": seconds["fingerprint"],
        "total": seconds["total"],
        "nbytes": report.nbytes,
        "shared": sum(engine.shared for engine in report.engines),
        "copied": sum(engine.copied for engine in report.engines),
        "fingerprint": report.staged,
    }
