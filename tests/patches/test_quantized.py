"""Quantized matrices: inputs of any sharding, and the nearest integers."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import patches
from patches import int8_truncation, quantized_input
from patches._lookup import module


def matrix(weight: np.ndarray, mesh: Mesh, activations: Any = None) -> Any:
    linear = module("sgl_jax.srt.layers.linear")
    plain = SimpleNamespace(
        weight=SimpleNamespace(
            value=jax.device_put(weight, NamedSharding(mesh, PartitionSpec("tensor", None)))
        ),
        **dict.fromkeys(("bias", "skip_bias_add")),
        output_scatter_dimension=None,  # of an older version
        kernel_axes=("tensor", None),
        params_dtype=jnp.float32,
        mesh=mesh,
        name="matrix",
    )
    return linear.QuantizedLinear.from_linear(plain, jnp.int8, activations)


@pytest.fixture
def mesh() -> Mesh:
    there = np.array(jax.devices()[:1]).reshape(1, 1)
    return Mesh(there, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def test_input_of_any_sharding(mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(4, 32)).astype(np.float32), rng.normal(size=(32, 8))
    given = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None)))
    with jax.set_mesh(mesh):
        layer = matrix(weight.astype(np.float32), mesh)
        if quantized_input.PATCH.is_needed():
            with pytest.raises(ValueError, match="shard"):
                layer(given)
        applied = patches.apply([quantized_input.PATCH])
        try:
            result, _ = layer(given)
        finally:
            patches.revert(applied)
    np.testing.assert_allclose(result, x @ weight, rtol=0, atol=0.2)


@pytest.mark.parametrize("activations", [None, jnp.int8], ids=["weights", "activations too"])
def test_nearest(mesh: Mesh, activations: Any) -> None:
    """Without the patch, a product of positive numbers is always too small."""
    rng = np.random.default_rng(0)
    applied = patches.apply([quantized_input.PATCH])
    errors = []
    try:
        # JAX traces the patched functions, because their arguments have another shape.
        for size, more in ((8, []), (16, [int8_truncation.PATCH])):
            applied += patches.apply(more)
            x = rng.uniform(0.5, 1, (size, 512)).astype(np.float32)
            weight = rng.uniform(0.5, 1, (512, size)).astype(np.float32)
            with jax.set_mesh(mesh):
                result, _ = matrix(weight, mesh, activations)(jnp.asarray(x))
            errors.append(np.asarray(result) / (x @ weight) - 1)
    finally:
        patches.revert(applied)
    assert errors[0].max() < -0.003
    assert np.abs(errors[1]).max() < 0.001
