"""Plans an update: which tensors make which leaf. It is checked before an engine is changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from enginepool.errors import InvalidWeights
from enginepool.weights import batches
from enginepool.weights.arrays import Array, jax_dtype
from enginepool.weights.conversion import Measured, Piece, in_layout, quantized_in_turn
from enginepool.weights.fingerprint import Summed
from enginepool.weights.fit import Fit, Fits
from enginepool.weights.placement import lends, lies_there, moves, part_size, place_all
from enginepool.weights.sources import Source, Specs
from enginepool.weights.tied import HEAD, TiedHead

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves


class Plan:
    """A source matched to a model. The constructor checks the source, unless it is a stream.

    Attributes:
        paths: The leaves that will change. For a stream, all leaves until it has ended.
        measured: The errors of the matrices that were quantized so far, by path.
    """

    def __init__(
        self, source: Source, leaves: EngineLeaves, mapping: Any, fits: Fits, *, strict: bool
    ) -> None:
        """
        Args:
            mapping: The `HuggingFaceMapping` of the engine that converts; None if there is none.
            fits: The checked sources of earlier updates.

        Raises:
            InvalidWeights: The source does not fit. The error has the names.
        """
        self._source = source
        self._private = source.private or source.stream is not None
        self.measured: dict[str, Measured] = {}
        self._specs = self._before = leaves.source_specs
        self._leaves = leaves.specs
        self._mapping = mapping
        self._tied = TiedHead(leaves.specs if strict else {})
        if leaves.quantized and leaves.quantization is None:
            raise InvalidWeights(
                "update_weights: the checkpoint of this model is quantized, or its scales are in "
                "blocks; start a new pool on the new weights, or open one on weights that are not "
                "quantized, with quantization_config_path='int8.yaml'",
                names=leaves.quantized,
            )
        self._quantizers = self._known = (
            {} if leaves.quantization is None else leaves.quantization.of
        )
        self._parts: Mapping[str, tuple[str, ...]] = {}
        if source.stream is not None:
            self._fit = Fit(source, self._specs, mapping, strict=strict)
            self.paths = list(self._leaves)
            return
        self._fit = fits.fit(source, self._specs, mapping, strict=strict)
        self._parts = self._fit.parts
        self.paths = self._made_of(self._parts)
        if self._tied.path is not None and HEAD in source.specs and source.load is not None:
            (embedding,) = self._parts[self._tied.path]
            self._tied.compare(source.load(HEAD), source.load(embedding), self._fit.said(HEAD))

    @property
    def left(self) -> list[str]:
        """Leaves that stay as they are (partial updates)."""
        return self._made_of(self._fit.left)

    def _made_of(self, paths: Iterable[str]) -> list[str]:
        """The model's leaves for these leaves of a source: two for a matrix that is quantized."""
        made = (self._known[path].leaves if path in self._known else (path,) for path in paths)
        return [leaf for leaves in made for leaf in leaves]

    @property
    def ignored(self) -> list[str]:
        """Names of the source that the model does not use."""
        return self._fit.ignored

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves that change, on one engine."""
        return sum(self._leaves[p].size * self._leaves[p].dtype.itemsize for p in self.paths)

    def arriving(self, specs: Specs, *, copied: bool) -> int:
        """Bytes that each device of an engine needs in addition to its weights. They include one
        batch's tensors during conversion. Arrays that a device shares need none."""
        parts, beside = [0], [0]
        for path in self.paths:
            spec = specs[path]
            assert spec.sharding is not None
            source = self._as_it_is(path)
            shared = lies_there(source, spec.sharding) and source.dtype == spec.dtype
            if copied or not shared:
                parts.append(part_size(spec) * spec.dtype.itemsize)
                # Conversion makes the whole leaf on the first engine's first device, or on every
                # device if the source is sharded over the engines' devices.
                size = spec.size if source is None else part_size(spec)
                beside.append(size * self._itemsize(path, spec))
        for path in self._quantizers:  # the source's matrix, and what of it is cast at once
            tensors = self._tensors(path)
            if self._source.stream is None and not tensors:
                continue
            own, wide = self._specs[path].size * self._specs[path].dtype.itemsize, self._size(path)
            own = own // quantized_in_turn(path, tensors, self._mapping) if wide > own else 0
            beside.append(wide + own)
        return sum(parts) + max(*beside, min(sum(beside), batches.BYTES))

    def again(self, made: Mapping[str, jax.Array], specs: Specs) -> Plan:
        """The same update for another engine, whose leaves are `specs`. A leaf comes from the
        source if the engine's devices already hold it, and else from `made`, the first engine's
        leaves. Nothing is read, gathered or converted a second time."""
        arrays = {}
        for path in self.paths:
            sharding, source = specs[path].sharding, self._as_it_is(path)
            assert sharding is not None
            arrays[path] = source if lies_there(source, sharding) else made[path]
        return self.copying(arrays)

    def copying(self, arrays: Mapping[str, jax.Array]) -> Plan:
        """An update of these leaves, from these arrays."""
        twin = copy.copy(self)
        twin._source = Source(True, arrays, arrays.__getitem__)
        twin._parts = {path: (path,) for path in arrays}
        twin.paths = list(arrays)
        twin._specs, twin._quantizers = self._leaves, {}
        return twin

    def batches(self, *, by_leaf: bool) -> Iterator[list[Piece]]:
        """The leaves in batches, one after the other. A tensor is read when its batch comes.

        Args:
            by_leaf: Whether a batch may take no more memory than the largest leaf.

        Raises:
            InvalidWeights: A stream does not fit. It cannot be checked ahead.
        """
        if self._source.stream is not None:
            pieces = self._streamed(self._source.stream)
            if by_leaf:  # the iterator may make a large tensor next
                yield from ([piece] for piece in pieces)
            else:
                size = lambda piece: self._size(piece.path)  # noqa: E731
                yield from batches.batched(pieces, lambda p: p.path, size, batches.BYTES)
            self._tied.forget()
            return
        load = self._source.load
        assert load is not None
        largest = max(map(self._size, self._parts), default=0)
        limit = largest if by_leaf else max(largest, batches.BYTES)
        for paths in batches.batched(self._parts, str, self._size, limit):
            yield [
                self._piece(path, {name: load(name) for name in self._parts[path]})
                for path in paths
            ]

    def only_moves(self, batch: Sequence[Piece]) -> bool:
        """Whether the leaves of a batch are copied or shared as they are, which takes no memory
        beside them."""
        return all(
            piece.quantizer is None and moves(piece.array, self._leaves[piece.path])
            for piece in batch
        )

    def ready(self, batch: Sequence[Piece], engines: Sequence[Specs]) -> dict[str, Array]:
        """The leaves of a batch in the model's layout. See `in_layout`."""
        made, measured = in_layout(batch, engines, self._mapping, private=self._private)
        self.measured |= measured
        return made

    def errors(self) -> dict[str, tuple[float, float]]:
        """The errors of each matrix that was quantized, as in `Measured`. Waits for the devices."""
        measured = jax.device_get(self.measured)
        return {path: (float(its.error[0]), float(its.error[1])) for path, its in measured.items()}

    def unquantized(self, made: Mapping[str, jax.Array]) -> dict[str, jax.Array | Summed]:
        """The source's leaves before they were quantized, for a fingerprint.

        Args:
            made: The first engine's new leaves.
        """
        found: dict[str, jax.Array | Summed] = {}
        measured = jax.device_get(self.measured)
        for path, spec in self._before.items():
            if path in measured:
                found[path] = Summed(spec.shape, spec.dtype, measured[path].sums)
            elif path in made:
                found[path] = made[path]
        return found

    def put(
        self,
        batch: Sequence[Piece],
        arrays: Mapping[str, Array],
        specs: Specs,
        *,
        copy: bool,
    ) -> tuple[dict[str, jax.Array], set[str]]:
        """Put a batch on an engine's devices.

        Args:
            arrays: The result of `ready` for this batch, or another engine's leaves.

        Returns:
            The leaves, and the paths of those that use the source's own buffers.
        """
        own = {piece.path: piece.array for piece in batch if piece.quantizer is None}
        paths = [leaf for piece in batch for leaf in piece.leaves]
        wanted = [specs[path] for path in paths]
        given = [arrays[path] for path in paths]
        lent = [
            array is own.get(path) and lends(array, spec.sharding, spec.dtype)
            for path, array, spec in zip(paths, given, wanted, strict=True)
        ]
        made = place_all(
            given,
            [spec.sharding for spec in wanted],
            [spec.dtype for spec in wanted],
            private=self._private,
            copy=lent if copy else None,
        )
        leaves = dict(zip(paths, made, strict=True))
        if self._source.stream is not None and self._tied.path in leaves:
            self._tied.made(leaves[self._tied.path])
        shared = {path for path, its in zip(paths, lent, strict=True) if its and not copy}
        return leaves, shared

    def _size(self, path: str) -> int:
        """Bytes that a leaf takes on a device while it is made."""
        spec = self._specs[path]
        # A matrix is quantized whole, on the first device of an engine. In parts it needs less.
        size = spec.size if path in self._quantizers else part_size(spec)
        return size * self._itemsize(path, spec)

    def _itemsize(self, path: str, spec: Any) -> int:
        """Bytes of an element of a leaf while it is made. Its source's dtype may be wider."""
        dtypes = [jax_dtype(tensor.dtype) for tensor in self._tensors(path).values()]
        return max(dtype.itemsize for dtype in [spec.dtype, *dtypes])

    def _tensors(self, path: str) -> dict[str, Any]:
        """The specs of a leaf's tensors. None are known of a stream."""
        return {name: self._source.specs[name] for name in self._parts.get(path, ())}

    def _piece(self, path: str, tensors: dict[str, Array]) -> Piece:
        as_it_is = self._source.by_path or self._mapping.keeps(path)
        array = next(iter(tensors.values())) if as_it_is else None
        return Piece(path, array, tensors, self._quantizers.get(path))

    def _as_it_is(self, path: str) -> Any:
        """The source's array for this leaf, or its spec. None if none is in the model's layout."""
        if path not in self._parts or path in self._quantizers:
            return None
        if self._source.by_path or self._mapping.keeps(path):
            return self._source.specs[self._parts[path][0]]
        return None

    def _streamed(self, stream: Iterator[tuple[str, Array]]) -> Iterator[Piece]:
        waiting: dict[str, dict[str, Array]] = {}
        done: set[str] = set()
        for name, array in stream:
            if isinstance(array, np.ndarray):  # its owner may reuse the memory
                array = np.array(array)
            path = self._mapping.paths.get(name)
            if path is None:
                self._fit.unknown(name)
                self._tied.came(name, array)
                continue
            if path in done or name in waiting.get(path, ()):
                raise InvalidWeights(f"{name}: came twice", names=[name])
            group = waiting.setdefault(path, {})
            group[name] = array
            del array
            if len(group) == len(self._mapping.names[path]):
                self._fit.check(path, group)
                done.add(path)
                tensors = {each: group[each] for each in self._mapping.names[path]}
                # Keep no reference, so that a tensor can be freed when its leaf is made.
                del group, waiting[path]
                yield self._piece(path, tensors)
                del tensors
        self.paths = self._made_of(path for path in self._specs if path in done)
        self._fit.ended(done, waiting)
