"""Recognises the sources that `update_weights` takes, and reads them as named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from enginepool.errors import InvalidWeights
from enginepool.weights import flax_tree
from enginepool.weights.arrays import Array, as_array, is_array
from enginepool.weights.checkpoint import Checkpoint, find, layers_left_out

Specs = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Source:
    """Named arrays, either by Hugging Face names or by the model's leaf paths.

    Attributes:
        by_path: Whether `specs` are named by leaf path; else by Hugging Face name.
        specs: The shape and dtype of each array; empty for a stream.
        load: Reads one array.
        stream: The arrays, one at a time, in the place of `specs` and `load`.
        origins: The caller's own names, where they differ.
        private: Whether nobody else has the memory that `load` returns.
        directory: The checkpoint's directory, if the source is a checkpoint.
        left_out: The name prefixes of layers of a checkpoint that the engines do not load.
    """

    by_path: bool
    specs: Mapping[str, Any] = field(default_factory=dict)
    load: Callable[[str], Array] | None = None
    stream: Iterator[tuple[str, Array]] | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    private: bool = False
    directory: Path | None = None
    left_out: tuple[str, ...] = ()


def read_source(
    source: Any,
    leaves: Specs,
    layers: int,
    *,
    download_dir: str | None = None,
    revision: str | None = None,
) -> Source:
    """Recognise a source. `leaves` are the model's leaves, in its order. `layers` is the number of
    its layers.

    Raises:
        InvalidWeights: The source is of an unknown kind, or broken.
    """
    # Imported here because flax registers exit callbacks, and importing enginepool must not do so.
    from flax import nnx

    if isinstance(source, str | Path):
        checkpoint = Checkpoint(find(source, download_dir, revision))
        directory = checkpoint.directory
        return Source(
            False,
            checkpoint.specs,
            checkpoint.load,
            private=True,
            directory=directory,
            left_out=layers_left_out(directory, layers),
        )
    if isinstance(source, nnx.State):
        flat = nnx.to_flat_state(source)
        return _of_paths({_dotted(path): _value(leaf) for path, leaf in flat})
    if isinstance(source, Mapping):
        return _of_mapping(source, leaves)
    if is_array(source):
        raise InvalidWeights("update_weights: a single array is no source; give it a name")
    if isinstance(source, Sequence):
        return _of_leaves(source, leaves)
    if isinstance(source, Iterable):
        return Source(False, stream=_pairs(iter(source)))
    raise InvalidWeights(
        f"update_weights cannot read a {type(source).__name__}; it takes a checkpoint directory "
        "or hub id, a dict of Hugging Face names, an nnx.State or dict by nnx path, a list of "
        "leaves in the model's order, a Flax parameter tree, or an iterator of (name, array)"
    )


def _of_mapping(source: Mapping[Any, Any], leaves: Specs) -> Source:
    flat = {name: _value(value) for name, value in flax_tree.flatten(source).items()}
    if not flat:
        raise InvalidWeights("update_weights: the source is empty")
    # A model may have leaves that are named as in a Flax tree: the gate of experts is `kernel`.
    if flax_tree.is_flax_tree(name for name in flat if name not in leaves):
        arrays, origins = flax_tree.to_leaves(flat, leaves)
        return Source(True, arrays, arrays.__getitem__, origins=origins)
    # Some names are both a leaf's path and the Hugging Face name of the transposed tensor. Names
    # count as paths if the dict is nested, has tuples as keys, or has a name that is only a path.
    nested = flat.keys() != set(source)
    if nested or (flat.keys() <= leaves.keys() and any(_only_a_path(name) for name in flat)):
        return _of_paths(flat)
    arrays = {name: as_array(name, value) for name, value in flat.items()}
    return Source(False, arrays, arrays.__getitem__)


def _of_paths(flat: Mapping[str, Any]) -> Source:
    arrays = {path: as_array(path, value) for path, value in flat.items()}
    return Source(True, arrays, arrays.__getitem__)


def _of_leaves(source: Sequence[Any], leaves: Specs) -> Source:
    if len(source) != len(leaves):
        raise InvalidWeights(
            f"update_weights: {len(source)} leaves given, the model has {len(leaves)}; a list has "
            "the leaves of the model's nnx.State in its order, as before quantization and without "
            "adapters"
        )
    return _of_paths(dict(zip(leaves, source, strict=True)))


def _pairs(items: Iterator[Any]) -> Iterator[tuple[str, Array]]:
    for item in items:
        try:
            name, value = item
        except (TypeError, ValueError):
            raise InvalidWeights(
                f"update_weights: an iterator must give (name, array), not {type(item).__name__}"
            ) from None
        if not isinstance(name, str):
            raise InvalidWeights(
                f"update_weights: an iterator must give (name, array), and {name!r} is no str"
            )
        yield name, as_array(name, value)


def _only_a_path(name: str) -> bool:
    """Whether Hugging Face has no tensor of this name: its parameters are weights and biases."""
    return not name.endswith((".weight", ".bias"))


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _value(leaf: Any) -> Any:
    from flax import nnx

    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
