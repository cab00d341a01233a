"""Weights in the layouts of trainers, and checks that engines have them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginepool import EnginePool
from enginepool.runtime import update
from enginepool.toy.files import read_checkpoint
from tests.support.forced import assert_greedy

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [7] * 30, [90, 91]]
NAMES = {"embed_tokens.weight": "embed_tokens.embedding", "lm_head.weight": "lm_head.embedding"}


def answers(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)


def serves(pool: EnginePool, model: Path) -> None:
    """Every engine gives the reference's answers for these weights."""
    assert pool.checksum()  # an error if the engines differ
    assert assert_greedy(model, PROMPTS, answers(pool)) > len(PROMPTS)


def own_layout(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By leaf path, in the model's layout: projections are (in, out), and norms are called
    scale."""
    leaves = {}
    for name, value in params.items():
        for theirs, ours in NAMES.items():
            if name.endswith(theirs):
                name = name.replace(theirs, ours)
        if name.endswith("norm.weight"):
            name = name.replace("norm.weight", "norm.scale")
        elif name.endswith("_proj.weight"):
            value = value.T
        leaves[name] = value
    return leaves


def placed(
    params: dict[str, np.ndarray], spec: PartitionSpec, devices: int = 4
) -> dict[str, jax.Array]:
    """The arrays on a mesh of the first devices. Norms and biases are replicated."""
    where = np.array(jax.devices()[:devices])
    one = "fsdp" in spec or not spec
    mesh = Mesh(where, ("fsdp",)) if one else Mesh(where.reshape(2, -1), tuple(spec))
    return {
        name: jax.device_put(
            np.array(value), NamedSharding(mesh, spec if value.ndim > 1 else PartitionSpec())
        )
        for name, value in params.items()
    }


def tensors(model: Path) -> dict[str, np.ndarray]:
    """A checkpoint's weights by their Hugging Face names."""
    return read_checkpoint(model)[1]


def leaves(model: Path) -> dict[str, np.ndarray]:
    """A checkpoint's weights by leaf path, in the model's layout."""
    return own_layout(tensors(model))


def pointers(pool: EnginePool, index: int) -> set[int]:
    """The addresses of an engine's weights."""
    scheduler: Any = pool.engines[index].scheduler_info["scheduler"]
    leaves = scheduler.tp_worker.worker.model_runner.model_state_leaves
    return {leaf.unsafe_buffer_pointer() for leaf in leaves}


@contextmanager
def no_host() -> Iterator[None]:
    """On this thread no array may be copied to the host, or from it."""
    # "disallow" would still permit explicit copies such as `device_put`.
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        yield


@contextmanager
def devices_only() -> Iterator[None]:
    """Placing new weights fails if it copies an array to the host, or from it."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            with no_host():
                return function(*args)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stage", "stream"):
            patch.setattr(update, name, guarded(getattr(update, name)))
        yield


def on_host(tree: Mapping[str, jax.Array]) -> list[str]:
    """The arrays of which JAX keeps a copy in host memory, of the whole or of a shard."""
    return [
        name
        for name, array in tree.items()
        for part in (array, *(shard.data for shard in array.addressable_shards))
        if part._npy_value is not None
    ]
