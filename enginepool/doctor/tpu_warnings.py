"""Warnings about a pool's settings on a TPU host, before an engine is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.config import PoolConfig
from enginepool.errors import InvalidConfig
from enginepool.sizing import rules
from enginepool.sizing.chips import chip_of
from enginepool.sizing.memory import Memory
from enginepool.sizing.settings import Settings
from enginepool.sizing.shape import read_shape


def warnings(jax: Mapping[str, Any], config: PoolConfig | None) -> list[dict[str, str]]:
    """A `{"problem", "remedy"}` for each warning; none on other platforms.

    Args:
        jax: Backend and devices, as `environment.start_jax` finds them.
    """
    devices = jax.get("devices") or []
    if jax.get("backend") != "tpu" or not devices:
        return []
    found = []
    chip = chip_of(devices[0]["kind"])
    if chip is not None and chip.note:
        found.append(rules.Advice(chip.note, "read docs/tpu.md before building on it"))
    if config is not None:
        found += _of_pool(config, free_bytes(devices))
    return [entry._asdict() for entry in found]


def free_bytes(devices: Sequence[Mapping[str, Any]]) -> int | None:
    """Free HBM of the device that has the least, by its own statistics or by its kind. None for an
    unknown kind.
    """
    free = []
    for device in devices:
        memory, chip = device.get("memory") or {}, chip_of(device["kind"])
        if "bytes_limit" in memory:
            free.append(memory["bytes_limit"] - memory.get("bytes_in_use", 0))
        elif chip is not None:
            free.append(chip.hbm_bytes)
    return min(free, default=None)


def _of_pool(config: PoolConfig, free: int | None) -> list[rules.Advice]:
    if free is None:
        return rules.page_advice(config.server_args)
    try:
        shape = read_shape(config.model, config.server_args)
    except InvalidConfig as error:
        unknown = rules.Advice(str(error), "its memory use is not known; see docs/plan.md")
        return [*rules.page_advice(config.server_args), unknown]
    args = config.engine_args("tpu", free, shape)
    memory = Memory(shape, Settings.of(args, shape), free)
    return rules.advice(memory, config.server_args, defaults=True)
