"""Experts, one tensor each, that become one stack in int8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from enginepool.weights.converters import Converter, convert, program, stack, traced
from enginepool.weights.fingerprint import part_sums
from enginepool.weights.gathering import gathered, join_program, kind_of, mesh_of, shards_of
from enginepool.weights.quantizer import Quantizer
from tests.support.marks import slow
from tests.support.quantized import errors, quantize
from tests.weights.test_shard_quantizing import DEVICES, matrix, quantizer

P = PartitionSpec
FIRST = SingleDeviceSharding(DEVICES[0])
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("a", "b"))
SHARDED = NamedSharding(mesh_of(DEVICES), P("all"))
SHAPE = (8, 16, 24)
WIDE = (16, 512, 1024)


def converter(of: Quantizer, specs: list[Any], sharding: Sharding, *, swaps: bool) -> Converter:
    def make(*tensors: jax.Array) -> jax.Array:
        experts = stack(*tensors).astype(of.dtype)
        return experts.swapaxes(-1, -2) if swaps else experts

    return of.after(traced(make, specs), sharding, transposes=swaps)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    ("source", "own", "swaps", "spec"),
    [
        ([np.float32], jnp.bfloat16, True, P("a", None, "b")),
        ([np.float32, jnp.bfloat16], jnp.bfloat16, False, P(None, "b", "a")),
        *slow(
            ([jnp.bfloat16], jnp.bfloat16, True, P()),
            ([np.float32], np.float32, False, P("a", "b")),
            ([np.float32], np.float16, True, P(("a", "b"))),
        ),
    ],
)
def test_as_numpy(source: Any, own: Any, swaps: bool, spec: PartitionSpec, gathers: bool) -> None:
    """Integers and scales are NumPy's, bit by bit, with errors and fingerprint of the whole stack.
    Experts may be wider than the model, and of several dtypes."""
    whole, there = matrix(SHAPE, np.float32).astype(own), NamedSharding(MESH, spec)
    given = whole.swapaxes(-1, -2) if swaps else whole
    host = [each.astype(source[i % len(source)]) for i, each in enumerate(given)]
    make = converter(quantizer(SHAPE, own), host, there, swaps=swaps)
    if gathers:
        tensors = [shards_of(jax.device_put(each, SHARDED), DEVICES) for each in host]
        ((numbers, scales, error, sums),) = gathered([make], [tensors], DEVICES)
    else:
        on_device = [jax.device_put(each, FIRST) for each in host]
        ((numbers, scales, error, sums),) = convert([make], [on_device], [FIRST])
    expected, scale = quantize(whole.swapaxes(-1, -2))
    assert len(numbers.addressable_shards) == (len(DEVICES) if gathers else 1)
    for found, wanted in ((numbers, expected.swapaxes(-1, -2)), (scales, scale[:, None, None])):
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted, strict=True)
    np.testing.assert_allclose(error, errors(whole.swapaxes(-1, -2)), rtol=1e-4)
    assert sums.tolist() == part_sums(jnp.asarray(whole), there).tolist()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("source", [jnp.bfloat16, np.float32])
def test_no_stack_but_the_integers(source: Any, gathers: bool) -> None:
    """The program has temporary memory for a few experts, but not for all of them."""
    count, *shape = WIDE
    specs = [jax.ShapeDtypeStruct(shape[::-1], source)] * count
    make = converter(quantizer(WIDE, jnp.bfloat16), specs, FIRST, swaps=True)
    if gathers:
        kind = kind_of(specs[0].shape, specs[0].dtype, SHARDED, DEVICES)
        everywhere = NamedSharding(mesh_of(DEVICES), P())
        part = jax.ShapeDtypeStruct(kind.part, source, sharding=everywhere)
        joined: Any = join_program((make,), (count,), (kind,) * count, DEVICES)
        lowered = joined.lower([[part] * len(DEVICES)] * count)
    else:
        lowered = program((make,), (FIRST,)).lower([specs])
    an_expert = shape[0] * shape[1] * 4
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 4 * an_expert


@pytest.mark.parametrize(
    "make",
    [
        lambda *tensors: stack(*tensors) + 1,
        lambda *tensors: stack(*tensors[::-1]),
        lambda *tensors: stack(*tensors).transpose(2, 1, 0),
        lambda *tensors: jnp.concatenate(tensors),
        lambda *tensors: tensors[1],
    ],
)
def test_other_conversions(make: Any) -> None:
    """What is more than a stack, a cast and an exchange of the last two axes is quantized whole."""
    found = traced(make, list(matrix((3, 16, 16), np.float32)))
    assert found.stacks is None
    assert found.swaps is None
