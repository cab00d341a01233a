"""Matrices that are sharded over devices, quantized part by part and then gathered."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from enginepool.weights import gathering, shard_quantizing
from enginepool.weights.converters import cast, traced
from enginepool.weights.fingerprint import part_sums
from enginepool.weights.gathering import gathered, shards_of
from enginepool.weights.quantizer import Quantizer
from enginepool.weights.shard_quantizing import quantized_shards, sharded_matrix
from tests.support.marks import slow
from tests.support.quantized import errors, quantize
from tests.weights.test_gathering import cut, programs_of

P = PartitionSpec
DEVICES = tuple(jax.devices()[:4])
# Of the first, each device packs its part; of the last, it does not.
SHAPES = [(16, 24), (4, 16, 24), (1024, 1536)]


def matrix(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    values = np.random.default_rng(len(shape)).normal(size=shape)
    values[..., 3, 5] *= 100  # its output has another scale, and one device has it
    values[..., 7] = 0
    return values.astype(dtype)


def quantizer(shape: tuple[int, ...], dtype: Any, path: str = "w", to: Any = np.int8) -> Quantizer:
    turned = len(shape) == 2
    scales = (shape[-1],) if turned else (shape[0], 1, 1, shape[-1])
    leaves = (f"{path}_q", f"{path}_scale")
    return Quantizer(path, leaves, shape, np.dtype(dtype), np.dtype(to), turned, scales)


def known(quantizer: Quantizer, source: jax.Array, axis: int) -> Any:
    swapped = traced(lambda x: x.swapaxes(-1, -2).astype(quantizer.dtype), [source])
    converter = cast(quantizer.dtype) if axis == -2 else swapped
    return sharded_matrix(quantizer, converter, [source], DEVICES)


def quantized(sources: list[jax.Array], quantizers: list[Quantizer], axis: int) -> list[Any]:
    shards = [shards_of(source, DEVICES) for source in sources]
    matrices = [
        known(quantizer, source, axis)
        for quantizer, source in zip(quantizers, sources, strict=True)
    ]
    converters, groups = zip(*quantized_shards(matrices, shards, DEVICES), strict=True)
    return gathered(converters, groups, DEVICES)


@pytest.mark.parametrize(
    ("spec", "axis", "order", "source", "to"),
    [
        (P(("a", "b")), -2, 1, jnp.bfloat16, np.int8),
        (P("b", "a"), -1, 1, np.float32, np.int8),
        (P(None, ("b", "a")), -2, 1, jnp.bfloat16, jnp.float8_e4m3fn),
        *slow(
            (P(None, "b"), -1, 1, jnp.bfloat16, np.int8),
            (P("a", "b"), -2, -1, np.float32, np.int8),
            (P("a"), -1, -1, np.float32, np.int8),
        ),
    ],
)
def test_as_numpy(spec: PartitionSpec, axis: int, order: int, source: Any, to: Any) -> None:
    """Whichever axes are sharded, every device has NumPy's numbers and scales, bit by bit, and the
    matrices' errors and fingerprints are those of whole matrices. Trainers may have a wider dtype
    and transposed matrices."""
    host = [matrix(shape, source) for shape in SHAPES]
    given = [np.ascontiguousarray(x.swapaxes(-1, -2)) if axis == -1 else x for x in host]
    sources = [cut(each, spec, order) for each in given]
    made = quantized(sources, [quantizer(shape, jnp.bfloat16, to=to) for shape in SHAPES], axis)
    for weight, (numbers, scales, error, sums) in zip(host, made, strict=True):
        rounded = weight.astype(jnp.bfloat16)
        expected, scale = quantize(rounded.swapaxes(-1, -2), to)
        if weight.ndim == 3:
            expected, scale = expected.swapaxes(-1, -2), scale[:, None, None]
        assert len(numbers.addressable_shards) == len(DEVICES)
        for found, wanted in ((numbers, expected), (scales, scale)):
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), wanted)
        if to == np.int8:
            np.testing.assert_allclose(error, errors(rounded.swapaxes(-1, -2)), rtol=1e-4)
        whole = part_sums(jnp.asarray(rounded), SingleDeviceSharding(DEVICES[0]))
        assert sums.tolist() == whole.tolist()


def test_no_program_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a gather without quantizing."""
    programs = programs_of(monkeypatch)
    for program in (shard_quantizing.largest_program, shard_quantizing.quantize_program):
        program.cache_clear()
    sources = [cut(matrix(shape, np.float32), P("a", "b")) for shape in SHAPES[:2]]
    quantized(sources, [quantizer(shape, np.float32) for shape in SHAPES[:2]], -2)
    assert len(programs) == 6
    words = ("all-gather", "all-reduce", "all-to-all", "collective", "send", "recv")
    assert [word for text in programs for word in words if word in text] == []


def test_layers_share_programs() -> None:
    """Layers that are alike compile nothing new."""
    programs = (
        shard_quantizing.largest_program,
        shard_quantizing.quantize_program,
        gathering.join_program,
    )

    def compiled() -> list[int]:
        return [program.cache_info().misses for program in programs]

    source = cut(matrix((16, 24), np.float32), P("a"))
    quantized([source], [quantizer((16, 24), np.float32, "layers.0.w")], -2)
    before = compiled()
    quantized([source], [quantizer((16, 24), np.float32, "layers.1.w")], -2)
    assert compiled() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor + tensor,
        lambda tensor: tensor.transpose(1, 2, 0),
        lambda tensor: tensor.astype(np.float16).astype(jnp.bfloat16),
        lambda tensor: tensor.reshape(256, 16).reshape(16, 16, 16),
    ],
)
def test_other_conversions(make: Any) -> None:
    """What is more than a cast and an exchange of the last two axes is gathered first, also if the
    shape is the same."""
    source = cut(matrix((16, 16, 16), np.float32), P("a"))
    own = quantizer((16, 16, 16), jnp.bfloat16)
    assert sharded_matrix(own, traced(make, [source]), [source], DEVICES) is None
    there_and_back = traced(lambda x: x.swapaxes(1, 2).swapaxes(1, 2), [source])
    found = sharded_matrix(own, there_and_back, [source], DEVICES)
    assert found is not None
    assert found.axis == -2


def test_cast_to_float16() -> None:
    """It is gathered first."""
    source = cut(matrix((16, 24), np.float32), P("a"))
    assert known(quantizer((16, 24), np.float16), source, -2) is None
    assert known(quantizer((16, 24), np.float16), source.astype(np.float16), -2) is not None


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_not_finite(number: float) -> None:
    """The scale of its output is NaN on every device. The others are not changed."""
    weight = matrix((16, 24), np.float32)
    weight[11, 4] = number
    ((numbers, scales, error, _),) = quantized(
        [cut(weight, P("a", "b"))], [quantizer((16, 24), np.float32)], -2
    )
    expected, scale = quantize(np.delete(weight, 4, axis=1).T)
    for found, wanted in ((numbers, expected), (scales, scale)):
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.delete(np.asarray(shard.data), 4, axis=0), wanted)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [4]
    assert np.isnan(error).all()
