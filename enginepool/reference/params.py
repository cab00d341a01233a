"""A checkpoint as a trainer has it: a Flax tree on the host, and arrays on the engines' devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from enginepool.errors import InvalidWeights
from enginepool.weights import flax_tree
from enginepool.weights.arrays import same_buffer
from enginepool.weights.checkpoint import Checkpoint
from enginepool.weights.placement import place

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves

# The leaves that `param_sharing_check` prints: the embedding, the last norm, and attention and MLP
# of the first layer. All leaves are checked.
SAMPLES = (
    "model.embed_tokens.embedding",
    "model.norm.scale",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
)


def read_flax_tree(directory: Path) -> dict[str, Any]:
    """The weights of a checkpoint in MLLM-JAX's layout (see weights/flax_tree.py), in NumPy."""
    checkpoint = Checkpoint(directory)
    tree: dict[str, Any] = {}
    for name in checkpoint.specs:
        path, array = _flax(name, checkpoint.load(name))
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return {"params": tree}


def on_devices(tree: Mapping[str, Any], engines: Sequence[EngineLeaves]) -> dict[str, jax.Array]:
    """The tree by nnx path in the model's own layout, one set on the devices of each engine.

    Raises:
        InvalidWeights: The tree is not one of this model.
    """
    specs = engines[0].specs
    arrays, _ = flax_tree.to_leaves(flax_tree.flatten(tree), specs)
    if wrong := sorted(specs.keys() ^ arrays.keys()):
        raise InvalidWeights(
            f"the Flax tree is not one of this model; one has and the other has not: {wrong}",
            names=wrong,
        )
    params = {}
    for path, spec in specs.items():
        sharding = _everywhere([leaves.specs[path].sharding for leaves in engines])
        params[path] = place(arrays[path], sharding, spec.dtype)
    jax.block_until_ready(list(params.values()))
    return params


def nbytes(params: Mapping[str, jax.Array]) -> int:
    """Bytes on all devices together."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        * len(array.sharding.device_set)
        for array in params.values()
    )


def sharing(
    params: Mapping[str, jax.Array], engines: Sequence[EngineLeaves]
) -> dict[str, dict[str, bool]]:
    """For each leaf: is it in the dict, and do all engines read the dict's own buffer?"""
    return {
        path: {
            "found_in_param_dict": path in params,
            "same_object": path in params
            and all(same_buffer(leaves[path], params[path]) for leaves in engines),
        }
        for path in engines[0]
    }


def _flax(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    name = re.sub(r"\.layers\.(\d+)", r".layers_\1", name)
    stem = name.removesuffix(".weight")
    if stem == name:
        return name, array
    if stem.endswith("embed_tokens"):
        return f"{stem}.embedding", array
    if array.ndim == 1:
        return f"{stem}.scale", array
    return f"{stem}.kernel", array.T


def _everywhere(shardings: Sequence[Any]) -> NamedSharding:
    """A sharding over all engines. Their meshes are stacked along an axis that the spec does not
    use, so each engine has a whole copy, sharded as in its own mesh."""
    meshes = [sharding.mesh for sharding in shardings]
    devices = np.stack([mesh.devices for mesh in meshes])
    mesh = Mesh(devices, ("engine", *meshes[0].axis_names))
    return NamedSharding(mesh, shardings[0].spec)
