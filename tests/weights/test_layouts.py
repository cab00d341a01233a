"""A trainer's weights in any layout, over any of the host's devices."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from enginepool import EnginePool, InvalidWeights
from enginepool.weights.placement import place
from enginepool.weights.tied import TiedHead
from tests.support.layouts import devices_only, leaves, no_host, on_host, serves, tensors
from tests.support.marks import slow
from tests.support.pools import SMALL, MakePool, compilations
from tests.support.reference import make_random_model


class Layout(NamedTuple):
    """A trainer's layout.

    Attributes: devices by id, the mesh that they make, how matrices are sharded over it.
    """

    devices: list[int]
    shape: tuple[int, ...]
    spec: tuple[Any, ...]

    def of(self, params: dict[str, np.ndarray], dtype: Any = np.float32) -> dict[str, jax.Array]:
        """An array of one axis is sharded by the first part of the spec. An array that cannot be
        sharded evenly is replicated."""
        devices = np.array(jax.devices())[self.devices]
        mesh = Mesh(devices.reshape(self.shape), ("x", "y")[: len(self.shape)])
        placed = {}
        for name, value in params.items():
            cut = NamedSharding(mesh, PartitionSpec(*self.spec[: value.ndim]))
            try:
                cut.shard_shape(value.shape)
            except ValueError:
                cut = NamedSharding(mesh, PartitionSpec())
            placed[name] = jax.device_put(np.array(value, dtype), cut)
        return placed


MODEL = "larger qwen3"
ALL = [0, 1, 2, 3]
LAYOUTS = {
    "replicated": Layout(ALL, (4,), ()),
    "FSDP": Layout(ALL, (4,), ("x",)),
    "tensor-sharded": Layout(ALL, (4,), (None, "x")),
    "in another order": Layout([3, 1, 0, 2], (4,), (None, "x")),
    "2-D": Layout(ALL, (2, 2), ("x", "y")),
    "2-D turned": Layout(ALL, (2, 2), ("y", "x")),
    "2-D, one axis replicates": Layout(ALL, (2, 2), (None, "y")),
    "2-D, both on one axis": Layout(ALL, (2, 2), (("y", "x"),)),
    "first two": Layout([0, 1], (2,), ("x",)),
    "last two": Layout([2, 3], (2,), ("x",)),
    "replicated on the last two": Layout([2, 3], (2,), ()),
    "three of which one is no engine's": Layout([1, 3], (2,), (None, "x")),
    "first": Layout([0], (1,), ()),
    "last": Layout([3], (1,), ()),
}
POOLS: dict[str, dict[str, Any]] = {
    "4 engines": {},
    "2 engines": {"devices": 2},
    "2 engines of 2": {"devices": 2, "tp_size": 2},
}


@pytest.fixture(params=["2 engines of 2", *slow("4 engines", "2 engines")])
def opened(request: pytest.FixtureRequest, make_pool: MakePool) -> EnginePool:
    """With version 0 or, with the target's weights, version 1."""
    return make_pool(MODEL, **POOLS[request.param], warmup="none")


@pytest.fixture
def engines(opened: EnginePool, model_dir: Callable[[str], Path]) -> EnginePool:
    """With version 0."""
    if opened.runtime.desired.weight_version != 0:
        opened.update_weights(model_dir(MODEL), weight_version=0)
    return opened


def assert_have(pool: EnginePool, expected: dict[str, np.ndarray]) -> None:
    for worker in pool.runtime.workers:
        assert set(worker.leaves) == set(expected)
        for path, value in expected.items():
            leaf = worker.leaves[path]
            assert leaf.sharding == worker.leaves.specs[path].sharding
            np.testing.assert_array_equal(np.asarray(leaf), value, err_msg=path)


@pytest.mark.parametrize("staging", ["double", *slow("stream")])
@pytest.mark.parametrize("form", [leaves, tensors], ids=["model's layout", "Hugging Face's"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(
    opened: EnginePool,
    model_dir: Callable[[str], Path],
    target: Callable[[str], Path],
    form: Callable[[Path], dict[str, np.ndarray]],
    layout: str,
    staging: Any,
) -> None:
    """Afterwards every engine has the checkpoint's own values, each leaf in its own sharding. No
    array of the trainer has gone through the host."""
    version = int(opened.runtime.desired.weight_version == 0)  # the version that they do not have
    checkpoint = (model_dir, target)[version](MODEL)
    tree = LAYOUTS[layout].of(form(checkpoint))
    with devices_only():
        report = opened.update_weights(tree, staging=staging, weight_version=version)
    assert on_host(tree) == []
    assert {engine.fingerprint for engine in report.engines} == {report.staged}
    assert_have(opened, leaves(checkpoint))


@pytest.mark.parametrize("layout", ["FSDP", *slow("replicated", "2-D", "last")])
def test_engines_serve_the_weights(
    engines: EnginePool, target: Callable[[str], Path], layout: str
) -> None:
    """Engines give the answers of a plain JAX forward pass on the checkpoint, also after several
    updates. The next update of the same shapes compiles nothing."""
    engines.update_weights(LAYOUTS[layout].of(leaves(target(MODEL))), strategy="rolling")
    tree = LAYOUTS[layout].of(leaves(target(MODEL)))
    with compilations() as seen:
        engines.update_weights(tree, strategy="rolling")
    assert seen == []
    assert_have(engines, leaves(target(MODEL)))
    serves(engines, target(MODEL))


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_any(layout: str, dtype: str) -> None:
    """Also into layouts that no engine has. Arrays are cast on the way as NumPy casts."""
    value = np.random.default_rng(0).normal(size=(8, 12, 3)).astype(np.float32)
    (array,) = LAYOUTS[layout].of({"": value}).values()
    for to in ("replicated", "2-D turned", "2-D, both on one axis", "last two", "last"):
        (there,) = LAYOUTS[to].of({"": value}).values()
        with no_host():
            made = place(array, there.sharding, jnp.dtype(dtype)).block_until_ready()
        assert on_host({"": array}) == []
        assert made.sharding == there.sharding
        np.testing.assert_array_equal(np.asarray(made), value.astype(dtype))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("layout", ["replicated", "FSDP"])
def test_put_aside_on_the_host(
    engines: EnginePool, target: Callable[[str], Path], layout: str, kind: str
) -> None:
    """Arrays that a trainer has moved to host memory (`memory_kind`) come from there, and are
    shared with no engine."""
    tree = {
        name: jax.device_put(array, array.sharding.with_memory_kind(kind))
        for name, array in LAYOUTS[layout].of(leaves(target(MODEL))).items()
    }
    for staging in ("double", "stream"):
        report = engines.update_weights(tree, staging=staging)
        assert {engine.shared for engine in report.engines} == {0}
        assert_have(engines, leaves(target(MODEL)))
    assert on_host(tree) == []


def test_summands_are_refused(pool: EnginePool, target: Callable[[str], Path]) -> None:
    """An array that its devices have yet to sum has no values. The error has the remedy."""
    name = "model.norm.scale"
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        parts = jax.device_put(
            np.ones((4, 256), np.float32), NamedSharding(mesh, PartitionSpec("x"))
        )
        summed: Any = jax.jit(
            lambda array: jnp.einsum("xi->i", array, out_sharding=PartitionSpec(unreduced={"x"}))
        )
        summands = summed(parts)
    before = pool.checksum()
    with pytest.raises(InvalidWeights, match=r"partial sum.*jax\.sharding\.reshard") as caught:
        pool.update_weights({**leaves(target(MODEL)), name: summands})
    assert caught.value.names == (name,)
    assert pool.checksum() == before


HEAD = "lm_head.weight"


@pytest.mark.parametrize("staging", ["double", "stream"])
@pytest.mark.parametrize("form", [dict, lambda tree: iter(tree.items())], ids=["dict", "iterator"])
def test_a_tied_head(
    engines: EnginePool, target: Callable[[str], Path], form: Callable[..., Any], staging: Any
) -> None:
    """It is compared with the embedding where the two are, in different layouts."""
    params = tensors(target(MODEL))
    embedding = params["model.embed_tokens.weight"]
    tree = LAYOUTS["FSDP"].of(params)
    for changed in (True, False):
        head = embedding.copy()
        head[-1, -1] += 0.5 * changed
        listed = {**tree, **LAYOUTS["2-D turned"].of({HEAD: head})}
        # For an iterator the comparison, which ends on the host, is part of placing.
        with devices_only() if form is dict else nullcontext():
            if changed:
                with pytest.raises(InvalidWeights, match="tie_word_embeddings"):
                    engines.update_weights(form(listed), staging=staging)
            else:
                engines.update_weights(form(listed), staging=staging)
        assert on_host(listed) == []
    assert_have(engines, leaves(target(MODEL)))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_a_tied_head_on_the_host(kind: str) -> None:
    """Beside an embedding in another layout, on the host, too, or on devices."""
    value = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
    other = value.copy()
    other[-1, -1] += 0.5
    tied = TiedHead({"model.embed_tokens.embedding": jax.ShapeDtypeStruct((16, 12), jnp.bfloat16)})

    def aside(array: jax.Array) -> jax.Array:
        return jax.device_put(array, array.sharding.with_memory_kind(kind))

    (embedding,) = LAYOUTS["FSDP"].of({"": value}).values()
    for layout in ("2-D turned", "replicated", "last"):
        same, changed = (aside(*LAYOUTS[layout].of({"": v}).values()) for v in (value, other))
        for one in (embedding, aside(embedding)):
            assert tied.equal(same, one)
            assert tied.equal(one, same)
            assert not tied.equal(changed, one)


@pytest.mark.parametrize("family", ["qwen3_moe", *slow("qwen2", "gemma2")])
def test_families(family: str, tmp_path: Path) -> None:
    """Tensors with Hugging Face names, including biases and stacked experts, become the leaves
    of a pool that starts with them, over the two devices of an engine."""
    first, second = (
        make_random_model(tmp_path / str(seed), family, seed, num_layers=1, num_heads=4)
        for seed in (1, 2)
    )
    options = SMALL | {"devices": [0, 1], "tp_size": 2, "warmup": "none"}
    options |= {"moe_backend": "epmoe"} if family == "qwen3_moe" else {}
    tree = LAYOUTS["FSDP"].of(tensors(second))
    with EnginePool(str(second), **options) as pool:
        fresh = {path: np.asarray(leaf) for path, leaf in pool.runtime.workers[0].leaves.items()}
    with EnginePool(str(first), **options) as pool:
        for source in (tree, iter(tree.items())):
            pool.update_weights(first)
            with devices_only():
                pool.update_weights(source)
            assert on_host(tree) == []
            assert_have(pool, fresh)
        # Of an expert it comes before the others of its stack, so the stack is not complete.
        twice = [item for item in tree.items() if item[0].endswith("down_proj.weight")][:1] * 2
        with pytest.raises(InvalidWeights, match=f"{twice[0][0]}: came twice"):
            pool.update_weights(iter([*twice, *tree.items()]))
        assert_have(pool, fresh)
