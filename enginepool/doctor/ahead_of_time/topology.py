"""TPU hosts that libtpu compiles for on a machine without one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.sizing.chips import Topology

# By default libtpu asks a metadata server which machine it runs on, and only one process of a host
# can load it. These settings change both, and name a machine. For programs that are only compiled,
# any machine will do.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# A v4 chip has two cores that work as one. libtpu must be told so.
_V4 = {
    "topology_name": "v4:2x2x1",
    "chip_config_name": "megacore",
    "chips_per_host_bounds": (2, 2, 1),
}
# For each slice, by its usual name: JAX's name, and further settings of libtpu.
_DESCRIPTIONS: Mapping[str, Mapping[str, Any]] = {
    "v4-8": _V4,
    **{
        f"{chip}-{chips}": {"topology_name": f"{chip}:{grid}", "chips_per_host_bounds": bounds}
        for chip in ("v5e", "v6e")
        for chips, grid, bounds in (
            (1, "1x1", (1, 1, 1)),
            (4, "2x2", (2, 2, 1)),
            (8, "2x4", (2, 4, 1)),
        )
    },
}


def chips_of(host: Topology) -> list[Any]:
    """The host's chips, as devices that can only be compiled for.

    Raises:
        InvalidConfig: libtpu is not installed, or does not know the host.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InvalidConfig(
            f"compiling for {host.name} needs libtpu, which is not installed: "
            "pip install 'enginepool[tpu]' (no TPU is needed for it)"
        )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", **_DESCRIPTIONS[host.name])
    except Exception as error:
        raise InvalidConfig(f"libtpu cannot compile for {host.name}: {error}") from error
    return list(described.devices)


@contextmanager
def libtpu_environment() -> Iterator[None]:
    """A block with the environment variables that libtpu and upstream read.

    JAX itself runs on the CPU, because it read JAX_PLATFORMS when it started. `ServerArgs`
    reads JAX_PLATFORMS again, and must find the TPU there.
    """
    import jax

    settings: Any = jax.config
    if settings.jax_platforms != "cpu":  # asking JAX for its devices would take them
        raise InvalidConfig(
            f"JAX_PLATFORMS={settings.jax_platforms}: compiling ahead of time needs no device "
            "and takes none; set JAX_PLATFORMS=cpu"
        )
    jax.devices()  # JAX starts, on the CPU
    wanted = {**_LIBTPU, "JAX_PLATFORMS": "tpu"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
