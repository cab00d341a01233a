"""Tensors that are cut over devices, made whole on each of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from enginepool.weights import gathering
from enginepool.weights.converters import cast, traced
from enginepool.weights.gathering import gathered, gathering_devices, shards_of

P = PartitionSpec
SPECS = (P("a"), P(None, "b"), P("a", "b"))
# Of the first, each device has less than what moves by itself, of the last more.
SHAPES = {"small": (8, 12), "stacked": (4, 8, 12), "large": (1024, 512)}


def cut(array: np.ndarray, spec: PartitionSpec, order: int = 1) -> jax.Array:
    devices = np.array(jax.devices()[:4][::order]).reshape(2, 2)
    return jax.device_put(array, NamedSharding(Mesh(devices, ("a", "b")), spec))


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("order", [1, -1], ids=["devices in order", "devices reversed"])
@pytest.mark.parametrize(
    "spec",
    [P(("a", "b")), P(None, "b"), P("a", "b"), P("b", "a"), P("a"), P(None, ("b", "a"))],
    ids=str,
)
def test_whole_on_every_device(spec: PartitionSpec, order: int) -> None:
    """Whichever axes are cut, over all of the devices or over some with copies on the others, every
    device has what NumPy has."""
    host = [values(shape) for shape in SHAPES.values()] + [values((16, 4), jnp.bfloat16)]
    sources = [cut(array, spec, order) for array in host]
    devices = gathering_devices(sources, [SingleDeviceSharding(d) for d in jax.devices()[:4]])
    assert devices is not None
    assert devices == tuple(jax.devices()[:4])
    converters = [cast(np.dtype(array.dtype)) for array in host]
    for (made,), wanted in zip(
        gathered(converters, [[shards_of(one, devices)] for one in sources], devices),
        host,
        strict=True,
    ):
        assert {shard.device for shard in made.addressable_shards} == set(devices)
        for shard in made.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted)


def test_leaves_of_several_tensors() -> None:
    """A converter gets the tensors of its leaf, whole and in order."""
    host = [values((8, 12)) + offset for offset in range(3)]
    sources = [cut(array, spec) for array, spec in zip(host, SPECS, strict=True)]
    stack = traced(lambda *parts: jnp.stack(parts).swapaxes(-1, -2), sources)
    devices = tuple(jax.devices()[:4])
    ((made,),) = gathered([stack], [[shards_of(one, devices) for one in sources]], devices)
    np.testing.assert_array_equal(np.asarray(made), np.stack(host).swapaxes(-1, -2))


def programs_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled text of each program that gathers, once it runs."""
    programs = []
    jit = jax.jit

    def noted(*args: Any, **kwargs: Any) -> Any:
        program: Any = jit(*args, **kwargs)

        def run(*operands: Any) -> Any:
            programs.append(program.lower(*operands).compile().as_text())
            return program(*operands)

        return run

    monkeypatch.setattr(jax, "jit", noted)
    gathering.pack_program.cache_clear()
    gathering.join_program.cache_clear()
    return programs


def test_no_program_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every device would wait for the step of the slowest engine, and two threads that
    start such programs might wait for each other."""
    programs = programs_of(monkeypatch)
    sources = [cut(values(shape), P("a", "b")) for shape in SHAPES.values()]
    converters = [cast(np.dtype(jnp.bfloat16))] * len(sources)
    devices = tuple(jax.devices()[:4])
    gathered(converters, [[shards_of(one, devices)] for one in sources], devices)
    assert len(programs) == 2
    words = ("all-gather", "all-reduce", "all-to-all", "collective", "send", "recv")
    assert [word for text in programs for word in words if word in text] == []
