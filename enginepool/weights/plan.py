"""What an update does: which leaf comes from which tensors, checked before anything is touched."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginepool.errors import InvalidWeights
from enginepool.weights.arrays import Array, jax_dtype, lies_in, same_buffer
from enginepool.weights.fit import Fit
from enginepool.weights.placement import gathered, in_parts, lies_there, place
from enginepool.weights.sources import Source, Specs
from enginepool.weights.tied import HEAD, TiedHead

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves


@dataclass(frozen=True)
class Piece:
    """One leaf and what it is made of.

    Attributes:
        path: The leaf.
        array: The whole leaf if the source has it in the model's layout, so that any engine may
            take its own shard of it; None if the tensors must be converted first.
    """

    path: str
    array: Array | None
    tensors: Mapping[str, Array]


class Plan:
    """A source joined to a model. Making one validates it, as far as it can be read ahead.

    Attributes:
        paths: The leaves that will change; for a stream, all of them until it has ended.
    """

    def __init__(self, source: Source, leaves: EngineLeaves, mapping: Any, *, strict: bool) -> None:
        """
        Args:
            mapping: The `HuggingFaceMapping` of the engine that converts; None if there is none.

        Raises:
            InvalidWeights: With the names in question.
        """
        self._source = source
        self._specs = leaves.specs
        self._mapping = mapping
        self._fit = Fit(source, leaves.specs, mapping, strict=strict)
        self._tied = TiedHead(leaves.specs if strict else {})
        if leaves.quantized:
            raise InvalidWeights(
                "update_weights: this model is quantized; start a new pool on the new weights",
                names=leaves.quantized,
            )
        if source.stream is not None:
            self.paths = list(leaves.specs)
            return
        self._fit.resolve()
        self._parts = self._fit.parts
        self.paths = [path for path in leaves.specs if path in self._parts]
        for path in self.paths:
            self._fit.check(path, {name: source.specs[name] for name in self._parts[path]})
        if self._tied.path is not None and HEAD in source.specs and source.load is not None:
            (embedding,) = self._parts[self._tied.path]
            self._tied.compare(source.load(HEAD), source.load(embedding), self._fit.said(HEAD))

    @property
    def left(self) -> list[str]:
        """Leaves that stay as they are (partial updates)."""
        return self._fit.left

    @property
    def ignored(self) -> list[str]:
        """Names of the source that mean nothing to the model."""
        return self._fit.ignored

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves that change, on one engine."""
        return sum(self._specs[p].size * self._specs[p].dtype.itemsize for p in self.paths)

    def arriving(self, specs: Specs, *, copied: bool) -> int:
        """Bytes that each of an engine's devices needs beside the set that it has, the largest
        tensor's copy for a conversion among them; what it has already, in the right layout, needs
        none."""
        parts, beside = [0], [0]
        for path in self.paths:
            spec = specs[path]
            assert spec.sharding is not None
            source = self._as_it_is(path)
            shared = lies_there(source, spec.sharding) and source.dtype == spec.dtype
            if copied or not shared:
                part = math.prod(spec.sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
                parts.append(part)
                # What is converted is whole first, on each of them.
                beside.append(part if source is not None else spec.size * spec.dtype.itemsize)
        return sum(parts) + max(beside)

    def again(self, made: Mapping[str, jax.Array], specs: Specs) -> Plan:
        """The same update for another engine, of these leaves: from what the first one made, and
        from the source where its device holds that already. Nothing is read, gathered or
        converted a second time."""
        twin = copy.copy(self)
        arrays = {}
        for path in self.paths:
            sharding, source = specs[path].sharding, self._as_it_is(path)
            assert sharding is not None
            arrays[path] = source if lies_there(source, sharding) else made[path]
        twin._source = Source(True, arrays, arrays.__getitem__)
        twin._parts = {path: (path,) for path in arrays}
        return twin

    def pieces(self) -> Iterator[Piece]:
        """The leaves one after the other; tensors are read when their turn comes.

        Raises:
            InvalidWeights: From a stream, which cannot be read ahead.
        """
        if self._source.stream is not None:
            yield from self._streamed(self._source.stream)
            return
        load = self._source.load
        assert load is not None
        for path in self.paths:
            yield self._piece(path, {name: load(name) for name in self._parts[path]})

    def whole(self, piece: Piece, specs: Sequence[jax.ShapeDtypeStruct]) -> Piece:
        """The piece with an array that is cut over these engines' devices gathered, at once for
        all of them."""
        shardings = [spec.sharding for spec in specs if spec.sharding is not None]
        if not isinstance(piece.array, jax.Array) or not in_parts(piece.array, shardings):
            return piece
        return replace(piece, array=gathered(piece.array, specs[0].dtype))

    def make(
        self, piece: Piece, spec: jax.ShapeDtypeStruct, *, copy: bool
    ) -> tuple[jax.Array, bool]:
        """A piece on an engine. What must be converted comes from the mapping's own devices, which
        are another engine's where that one has failed since.

        Returns:
            The leaf, and whether it is the source's own buffer.
        """
        private = self._source.private
        assert spec.sharding is not None
        if piece.array is not None:
            made = place(piece.array, spec.sharding, spec.dtype, private=private)
        else:
            made = place(self._convert(piece), spec.sharding, spec.dtype)
        shared = any(same_buffer(made, tensor) for tensor in piece.tensors.values())
        if shared and copy:
            made = jax.device_put(jnp.array(made, copy=True), made.sharding)
        if self._source.stream is not None:
            self._tied.made(piece.path, made)
        return made, shared and not copy

    def _convert(self, piece: Piece) -> jax.Array:
        # Conversion makes new memory, mostly, and is over before the caller can write to the old:
        # no copy is needed first. A stream's owner may fill the same memory anew in between.
        private = self._source.private
        lasting = self._source.stream is None

        def put(name: str, sharding: Sharding) -> jax.Array:
            tensor = piece.tensors[name]
            return place(tensor, sharding, jax_dtype(tensor.dtype), private=private or lasting)

        made = self._mapping.convert(piece.path, piece.tensors, put)
        host = [x for x in piece.tensors.values() if isinstance(x, np.ndarray)]
        if not private and any(lies_in(made, memory) for memory in host):
            made = jax.device_put(jnp.array(made, copy=True), made.sharding)
        return made

    def _piece(self, path: str, tensors: dict[str, Array]) -> Piece:
        as_it_is = self._source.by_path or self._mapping.keeps(path)
        return Piece(path, next(iter(tensors.values())) if as_it_is else None, tensors)

    def _as_it_is(self, path: str) -> Any:
        """The source's array of this leaf, unread, if it is in the model's layout."""
        if self._source.stream is not None:
            return None
        if self._source.by_path or self._mapping.keeps(path):
            return self._source.specs[self._parts[path][0]]
        return None

    def _streamed(self, stream: Iterator[tuple[str, Array]]) -> Iterator[Piece]:
        waiting: dict[str, dict[str, Array]] = {}
        done: set[str] = set()
        for name, array in stream:
            path = self._mapping.paths.get(name)
            if path is None:
                self._fit.unknown(name)
                self._tied.came(name, array)
                continue
            if path in done:
                raise InvalidWeights(f"{name}: came twice", names=[name])
            group = waiting.setdefault(path, {})
            group[name] = array
            if len(group) == len(self._mapping.names[path]):
                self._fit.check(path, group)
                done.add(path)
                # No reference stays here: a tensor can go when its leaf is made.
                del group, array
                yield self._piece(path, waiting.pop(path))
        self._tied.forget()
        self.paths = [path for path in self._specs if path in done]
        self._fit.ended(done, waiting)
