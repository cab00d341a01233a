"""A Flax (linen) parameter tree in MLLM-JAX's layout, as leaves of the engine's model.

In such a tree `kernel` is (in, out) like upstream's `weight`, and layers are named `layers_0`. Only
the head is transposed: `lm_head.kernel` is (hidden, vocab), and upstream's `lm_head.embedding` is
(vocab, hidden). A projection without `bias` gets a bias of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from enginepool.errors import InvalidWeights
from enginepool.weights.arrays import Array, as_array
from enginepool.weights.tied import HEAD

_LAYER = re.compile(r"\blayers_(\d+)")
_KERNEL = "lm_head.kernel"


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping to one with dotted names.

    Raises:
        InvalidWeights: A name comes twice.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + (".".join(map(str, key)) if isinstance(key, tuple) else str(key))
        new = flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        if twice := sorted(flat.keys() & new.keys()):
            raise InvalidWeights(f"update_weights: {twice[0]} comes twice", names=twice)
        flat |= new
    return flat


def is_flax_tree(names: Iterable[str]) -> bool:
    """Whether flattened names are those of such a tree."""
    return any(name.endswith(".kernel") or _LAYER.search(name) for name in names)


def to_leaves(
    flat: Mapping[str, Any], specs: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays by leaf path, and for each path its name in the tree.

    A head that the model does not have (tied embeddings) gets its Hugging Face name.

    Raises:
        InvalidWeights: Two names are the same leaf, or an array cannot be read.
    """
    arrays: dict[str, Array] = {}
    origins: dict[str, str] = {}
    for name, value in flat.items():
        path, array = _leaf(name.removeprefix("params."), as_array(name, value))
        if path == "lm_head.embedding" and path not in specs:
            path = HEAD
        if path in arrays:
            raise InvalidWeights(
                f"update_weights: {path} comes twice, as {origins[path]} and as {name}; leave one "
                "of them out",
                names=[origins[path], name],
            )
        arrays[path], origins[path] = array, name
    for path, spec in specs.items():
        # Only if the tree has the projection's weight: a partial tree may not have the projection.
        given = path.endswith("_proj.bias") and path.removesuffix("bias") + "weight" in arrays
        if given and path not in arrays:
            arrays[path], origins[path] = np.zeros(spec.shape, spec.dtype), path
    return arrays, origins


def _leaf(name: str, array: Array) -> tuple[str, Array]:
    if name == _KERNEL:
        return "lm_head.embedding", array.T
    path = _LAYER.sub(r"layers.\1", name)
    return re.sub(r"\.kernel$", ".weight", path), array
