"""Which devices the engines of a pool run on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from enginepool.errors import InvalidConfig
from enginepool.values import is_int, plain, shown

DeviceSpec = int | Sequence[int] | Sequence[jax.Device] | None


def resolve_devices(devices: DeviceSpec, tp_size: int) -> list[list[jax.Device]]:
    """The devices of each engine: `tp_size` neighbours each, in the order of `devices`.

    On the CPU platform, a count of N engines asks JAX for N × `tp_size` virtual devices, if JAX has
    not started yet.

    Args:
        devices: A count of engines, device ids, `jax.Device`s, or None for all local devices.

    Raises:
        InvalidConfig: There are too few devices (the message says how to get more), an id is named
            twice, unknown or of another process, or `tp_size` does not divide the list.
    """
    devices = plain(devices)
    if isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise InvalidConfig(f"devices={shown(devices)}: expected a count of 1 or more")
    if not (devices is None or isinstance(devices, int)) and (
        isinstance(devices, str) or not hasattr(devices, "__iter__")
    ):
        raise InvalidConfig(f"devices={shown(devices)}: expected a count, or a list of device ids")
    if isinstance(devices, int):
        _ask_for_virtual_devices(devices * tp_size)
    local = jax.local_devices()  # only those of this process, if the program has several
    if isinstance(devices, int):
        chosen = _first(local, devices * tp_size)
    elif devices is None:
        chosen = local[: len(local) // tp_size * tp_size]
        if not chosen:
            raise InvalidConfig(f"tp_size={tp_size} needs more than the {len(local)} local devices")
    else:
        chosen = _named(local, devices)
        if not chosen or len(chosen) % tp_size:
            raise InvalidConfig(
                f"devices={shown(devices)}: {len(chosen)} devices cannot be split into engines of "
                f"tp_size={tp_size}"
            )
    return [chosen[i : i + tp_size] for i in range(0, len(chosen), tp_size)]


def _first(local: list[jax.Device], count: int) -> list[jax.Device]:
    if count > len(local):
        platform = local[0].platform
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts, or "
            "open the pool before anything else uses JAX"
            if platform == "cpu"
            else "ask for fewer engines"
        )
        raise InvalidConfig(
            f"{count} devices are needed and JAX has {len(local)} on platform {platform}: {remedy}"
        )
    return local[:count]


def _named(local: list[jax.Device], devices: Sequence[int] | Sequence[jax.Device]) -> list:
    by_id = {device.id: device for device in local}
    chosen = []
    for device in devices:
        device_id = device if isinstance(device, int) else getattr(device, "id", device)
        if not is_int(device_id) or device_id not in by_id:
            raise InvalidConfig(f"devices: {_unknown(device_id)}; JAX has {sorted(by_id)}")
        if by_id[device_id] in chosen:
            raise InvalidConfig(
                f"devices: id {device_id} is named twice; each device can have one engine only"
            )
        chosen.append(by_id[device_id])
    return chosen


def _unknown(device_id: Any) -> str:
    for device in jax.devices():
        if device.id == device_id:
            return f"id {device_id} belongs to process {device.process_index}; use it there"
    return f"unknown id {shown(device_id)}"


def _ask_for_virtual_devices(count: int) -> None:
    """Ask JAX for virtual CPU devices, if the platform is CPU and JAX has not started."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    config: Any = jax.config  # pyright does not see its attributes
    platforms = config.jax_platforms or os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        on_cpu = platforms.split(",")[0] == "cpu"
    else:
        on_cpu = not any(importlib.util.find_spec(plugin) for plugin in ("libtpu", "jax_plugins"))
    if on_cpu and config.jax_num_cpu_devices < count:
        with contextlib.suppress(RuntimeError):  # JAX has started already
            jax.config.update("jax_num_cpu_devices", count)
