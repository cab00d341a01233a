"""TPU chips and the slices of them that are one host."""

from __future__ import annotations

from dataclasses import dataclass

from enginepool.errors import InvalidConfig
from enginepool.values import did_you_mean

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """A generation of TPU.

    Attributes:
        kind: Its name in `jax.Device.device_kind`.
        hbm_bytes: The memory that XLA's compiler accepts. The data sheet says more.
        bandwidth: The HBM's bytes a second, as published.
        note: A warning for users of this chip.
    """

    name: str
    kind: str
    hbm_bytes: int
    bandwidth: int
    note: str = ""


V4 = Chip(
    *("v4", "TPU v4", int(30.75 * GIB), 1228 * 10**9),
    note="sglang-jax 0.1.0rc0 has no attention block sizes for v4. With those of a patch it "
    "compiles, but it has never been run",
)
V5E = Chip("v5e", "TPU v5 lite", int(15.75 * GIB), 819 * 10**9)
V6E = Chip("v6e", "TPU v6 lite", int(31.25 * GIB), 1640 * 10**9)


@dataclass(frozen=True)
class Topology:
    name: str
    chip: Chip
    chips: int


# A v4 slice is named by its cores, of which a chip has two.
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("v4-8", V4, 4),
        *(Topology(f"v5e-{chips}", V5E, chips) for chips in (1, 4, 8)),
        *(Topology(f"v6e-{chips}", V6E, chips) for chips in (1, 4, 8)),
    )
}


def topology(name: str) -> Topology:
    """The slice of this name.

    Raises:
        InvalidConfig: It is not one of the known single-host slices.
    """
    found = TOPOLOGIES.get(name)
    if found is None:
        hint = did_you_mean(name, TOPOLOGIES)
        raise InvalidConfig(
            f"topology {name!r}: expected a slice of one host, one of {', '.join(TOPOLOGIES)}{hint}"
        )
    return found


def chip_of(kind: str) -> Chip | None:
    """The chip by `device_kind`. None if the kind is not known."""
    return next((chip for chip in (V4, V5E, V6E) if chip.kind == kind), None)
