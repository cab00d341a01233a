"""Patches that make a step cheaper change no result, to the last bit."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import patches
from enginepool import EnginePool
from patches import batch_transfers, metadata_check
from patches._lookup import module
from tests.support.marks import slow
from tests.support.pools import MakePool

OPTIMISATIONS = [patch for patch in patches.ALL if patch.optimisation]
MIXED = [
    {"temperature": 0.0, "max_new_tokens": 30},
    {"temperature": 1.0, "max_new_tokens": 11, "sampling_seed": 3},
    {"temperature": 0.7, "max_new_tokens": 24, "sampling_seed": 4, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.5, "max_new_tokens": 17, "sampling_seed": 5, "frequency_penalty": 0.5},
] * 3


@pytest.fixture(params=[1, *slow(2)], ids=["tp_size=1", "tp_size=2"])
def engine(request: pytest.FixtureRequest, make_pool: MakePool) -> Iterator[EnginePool]:
    # With several steps a launch, timing decides which requests share a batch, and with it
    # the last bit.
    model, devices = [("qwen3", [1]), ("larger qwen3", [2, 3])][request.param - 1]
    pool = make_pool(model, devices, tp_size=request.param, max_decode_steps=1)
    applied = [patch for patch in OPTIMISATIONS if patches.is_applied(patch)]
    yield pool
    patches.apply(applied)


def answers(pool: EnginePool) -> list[Any]:
    pool.flush_cache()
    prompts = [[5 + i, *range(9, 9 + 5 * (i % 4))] for i in range(len(MIXED))]
    results = pool.generate_all(input_ids=prompts, sampling_params=MIXED, return_logprob=True)
    return [
        (result["output_ids"], result["meta_info"]["output_token_logprobs"]) for result in results
    ]


def test_ids_and_logprobs_are_the_same(engine: EnginePool) -> None:
    """Requests of every kind, in batches that change because requests begin and end."""
    patches.apply(OPTIMISATIONS)
    assert all(patches.is_applied(patch) for patch in OPTIMISATIONS)
    fast = answers(engine)
    patches.revert(OPTIMISATIONS)
    assert answers(engine) == fast


@pytest.fixture
def upstream() -> Iterator[Any]:
    """A module of upstream's that sends arrays. Its patches are put back afterwards."""
    applied = patches.is_applied(batch_transfers.PATCH)
    patches.revert([batch_transfers.PATCH])
    yield module("sgl_jax.srt.sampling.sampling_batch_info")
    patches.revert([batch_transfers.PATCH])
    patches.apply([batch_transfers.PATCH] if applied else [])


def test_transfers(upstream: Any) -> None:
    """The devices get the arrays that upstream would put there, the first and the second time:
    values, type, sharding, and what selects a program in JAX."""
    arrays: list[Any] = [
        *(np.arange(8, dtype=dtype) for dtype in (np.int32, np.int64, np.float32, np.float64)),
        *(np.array([True, False]), np.arange(8, dtype=np.int32)[::2], None),
    ]
    shardings = [
        NamedSharding(_mesh(first, devices), spec)
        for first, devices in ((0, 1), (1, 1), (2, 2))
        for spec in (PartitionSpec(), PartitionSpec("data"), PartitionSpec("tensor"))
    ]
    expected = [upstream.device_array(tuple(arrays), sharding=s) for s in shardings]
    patches.apply([batch_transfers.PATCH])
    for add in (0, 1):
        for sharding, right in zip(shardings, expected, strict=True):
            found = upstream.device_array(tuple(arrays), sharding=sharding)
            assert found[-1] is right[-1] is None
            for one, other in zip(found[:-1], right[:-1], strict=True):
                assert one.aval == other.aval
                assert (one.sharding, one.committed) == (other.sharding, other.committed)
                np.testing.assert_array_equal(one, other)
            single = upstream.device_array(arrays[0] + add, sharding=sharding)
            np.testing.assert_array_equal(single, arrays[0] + add)


@pytest.fixture
def backend() -> Iterator[Callable[[Any], Any]]:
    """Makes attention backends like upstream's, with metadata that flax has seen already."""
    base = module("sgl_jax.srt.layers.attention.base_attn_backend").AttentionBackend

    class Backend(base):
        def __init__(self, metadata: Any) -> None:
            self.forward_metadata = metadata

        def get_forward_metadata(self, batch: Any) -> None: ...

    applied = patches.is_applied(metadata_check.PATCH)
    patches.revert([metadata_check.PATCH])
    yield Backend
    patches.revert([metadata_check.PATCH])
    patches.apply([metadata_check.PATCH] if applied else [])


def test_metadata(backend: Callable[[Any], Any]) -> None:
    """The metadata of a step is stored in the backend, as if flax had looked through it. An
    object of another type is examined, and refused as without the patch."""

    def outcome() -> tuple[str, Any]:
        kernel, native = backend(nnx.data((np.zeros(2),))), backend(None)
        kernel.forward_metadata, native.forward_metadata = (np.ones(2),), None
        with pytest.raises(ValueError, match="static attribute 'forward_metadata'") as refused:
            native.forward_metadata = jax.numpy.ones(2)
        graph, state = nnx.split(kernel)
        assert jax.tree.leaves(state)[0].tolist() == [1.0, 1.0]
        return str(refused.value), graph

    right = outcome()
    patches.apply([metadata_check.PATCH])
    assert outcome() == right


def _mesh(first: int, devices: int) -> Mesh:
    return Mesh(
        np.array(jax.devices()[first : first + devices]).reshape(1, devices),
        ("data", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
    )


def test_switch() -> None:
    """ENGINEPOOL_OPTIMISATIONS=0 leaves them out, and nothing else."""
    script = """if True:
        import os, patches
        print(*[patch.name for patch in patches.apply()])
        del os.environ["ENGINEPOOL_OPTIMISATIONS"]
        print(*[patch.name for patch in patches.apply()])
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "ENGINEPOOL_OPTIMISATIONS": "0"},
    )
    without, then = done.stdout.splitlines()
    assert set(then.split()) == {patch.name for patch in OPTIMISATIONS}
    assert len(without.split()) > len(then.split())
