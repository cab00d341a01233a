"""TPU hosts that libtpu compiles for on a machine without one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from enginepool.errors import InvalidConfig

GIB = 2**30
# libtpu asks a metadata server which machine it is on, wants a name for it (any, for a program that
# is only compiled), and lets one process of a host load it.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Topology:
    """A host as people name it.

    Attributes:
        description: What JAX calls it, and what else libtpu has to be told.
        hbm_bytes: What the compiler lets one program have on a chip: less than the data sheet's.
    """

    name: str
    hbm_bytes: int
    description: Mapping[str, Any] = field(hash=False)

    def devices(self) -> list[Any]:
        """Its chips, as devices that can be compiled for and nothing else.

        Raises:
            InvalidConfig: libtpu is not installed, or knows no such host.
        """
        from jax.experimental import topologies

        try:
            described = topologies.get_topology_desc(platform="tpu", **self.description)
        except Exception as error:
            raise InvalidConfig(
                f"cannot compile for {self.name}: {error}; libtpu comes with "
                "pip install 'enginepool[tpu]', or with make tpu-check"
            ) from error
        return list(described.devices)


# One chip of a v4 is two cores that work as one, which libtpu has to be told.
_V4 = {
    "topology_name": "v4:2x2x1",
    "chip_config_name": "megacore",
    "chips_per_host_bounds": (2, 2, 1),
}
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("v4-8", int(30.75 * GIB), _V4),
        Topology("v5e-8", int(15.75 * GIB), {"topology_name": "v5e:2x4"}),
        Topology("v6e-8", int(31.25 * GIB), {"topology_name": "v6e:2x4"}),
    )
}


@contextmanager
def libtpu_environment() -> Iterator[None]:
    """What libtpu and upstream look for in the environment, while it lasts.

    JAX itself runs on the CPU: it has read its platform when it started. `ServerArgs` reads it
    again, and wants to see the device that it is given.
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
