"""The layer that adapters change."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from enginepool import EnginePool
from enginepool.doctor.ahead_of_time.reads import read_in_any_case
from patches._lookup import module

LAYERS, SLOTS, RANK, IN, OUT, TOKENS = 3, 3, 4, 8, 16, 5


def made(devices: int, axes: tuple[Any, Any]) -> tuple[Any, Any, list[jax.Array]]:
    """A layer, a function that runs it on rows, and its leaves: A, B, and last the weight."""
    from enginepool.lora.layers import on_batch, with_slots

    rng, linear = np.random.default_rng(0), module("sgl_jax.srt.layers.linear").LinearBase
    plain = linear(IN, OUT, jax.sharding.get_mesh(), use_bias=False, params_dtype=np.float32,
                   kernel_axes=axes)  # fmt: skip
    definition, state = nnx.split(with_slots([plain] * LAYERS, SLOTS, RANK)[-1])
    leaves, structure = jax.tree.flatten(state)
    leaves = [
        jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding)
        for leaf in leaves
    ]

    @jax.jit
    def run(leaves: Any, x: jax.Array, slots: jax.Array, scales: jax.Array) -> jax.Array:
        layer = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
        with on_batch(SimpleNamespace(lora_token_indices=slots, lora_scalings=scales)):
            return layer(x)[0]

    return plain, run, leaves


def rows(axes: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    mesh, rng = jax.sharding.get_mesh(), np.random.default_rng(1)
    x = rng.normal(size=(TOKENS, IN)).astype(np.float32)
    slots, scales = np.array([0, 2, -1, 1, 2], np.int32), np.array([1, 0.5, 0, 2, 3], np.float32)
    return (
        jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", axes[0]))),
        *(jax.device_put(a, NamedSharding(mesh, PartitionSpec("data"))) for a in (slots, scales)),
    )


def mesh(devices: int) -> Any:
    where = np.array(jax.devices()[:devices]).reshape(1, devices)
    return jax.set_mesh(Mesh(where, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2))


@pytest.mark.usefixtures("opened")  # upstream is patched
@pytest.mark.parametrize("axes", [(None, "tensor"), ("tensor", None)])
@pytest.mark.parametrize("devices", [1, 2])
def test_each_row_has_its_own_adapter(devices: int, axes: tuple[Any, Any]) -> None:
    with mesh(devices):
        _, run, leaves = made(devices, axes)
        (*_, a), (*_, b), weight = map(np.asarray, leaves)
        given = rows(axes)
        x, slots, scales = map(np.asarray, given)
        got = np.asarray(run(leaves, *given))
    for row in range(TOKENS):
        whole = weight.copy()
        if slots[row] >= 0:
            whole += scales[row] * (b[slots[row]] @ a[slots[row]]).T
        assert got[row] == pytest.approx(x[row] @ whole, abs=1e-4)


@pytest.mark.usefixtures("opened")
def test_an_adapter_that_overflows_hurts_no_other_row() -> None:
    with mesh(1):
        _, run, leaves = made(1, (None, None))
        leaves[0] = leaves[0].at[-1, 1].set(3e38)
        given = rows((None, None))
        got = np.asarray(run(leaves, *given))
    others = np.asarray(given[1]) != 1
    assert np.isfinite(got[others]).all()
    assert not np.isfinite(got[~others]).all()


@pytest.mark.usefixtures("opened")
def test_a_batch_without_adapters_reads_none(opened: EnginePool) -> None:
    """In the compiled program only a branch uses A and B."""
    with mesh(1):
        _, run, leaves = made(1, (None, None))
        text = run.lower(leaves, *rows((None, None))).compile().as_text()
    a, b, weight = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    assert read_in_any_case(text, [a, b]) == 0
    assert read_in_any_case(text, [weight]) == 4 * IN * OUT
