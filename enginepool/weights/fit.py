"""Checks that a source fits a model: every name, shape and dtype, at opening and in an update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginepool.errors import InvalidWeights
from enginepool.weights.arrays import convertible
from enginepool.weights.name_mismatch import listed, mismatch
from enginepool.weights.sources import Source, Specs
from enginepool.weights.tied import HEAD

# Tensors that checkpoints carry and models do not need.
_TOLERATED = ("rotary_emb.inv_freq",)
# At most this many kinds of sources are remembered. A trainer has one or two.
_KNOWN = 4


class Fits:
    """Remembers the checked sources of a pool's updates. A source with the names, shapes and dtypes
    of an earlier source is not checked again. Only one update at a time uses this."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Fit] = OrderedDict()

    def fit(self, source: Source, specs: Specs, mapping: Any, *, strict: bool) -> Fit:
        """
        Raises:
            InvalidWeights: The source does not fit. The error has the names.
        """
        alike = (
            source.by_path,
            strict,
            tuple((name, tuple(each.shape), each.dtype) for name, each in source.specs.items()),
            tuple(source.origins.items()),
            source.left_out,
        )
        fit = self._known.pop(alike, None)
        if fit is None:
            fit = Fit(source, specs, mapping, strict=strict)
            fit.resolve()
            for path, names in fit.parts.items():
                fit.check(path, {name: source.specs[name] for name in names})
            fit.forget_source()
        self._known[alike] = fit
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return fit


class Fit:
    """Maps each leaf of a model to the tensors of a source that make it.

    Attributes:
        parts: For each leaf that the source has, the names of its tensors.
        left: Leaves that the source does not have (partial updates).
        ignored: Names of the source that the model does not use.
    """

    def __init__(
        self,
        source: Source,
        specs: Specs,
        mapping: Any,
        *,
        strict: bool,
        opening: Path | None = None,
    ) -> None:
        """
        Args:
            mapping: The `HuggingFaceMapping`; None if the source names leaf paths.
            opening: The checkpoint that an engine opens with; None for an update.
        """
        self._source: Source | None = source
        self._by_path, self._origins = source.by_path, source.origins
        self._left_out = source.left_out
        self._specs = specs
        self._mapping = mapping
        self._strict = strict
        self._opening = opening
        self._where = "update_weights: " if opening is None else f"{opening}: "
        self.parts: dict[str, tuple[str, ...]] = {}
        self.left: list[str] = []
        self.ignored: list[str] = []

    def resolve(self) -> None:
        """Find `parts`.

        Raises:
            InvalidWeights: A name is missing or unknown, or no name is the model's.
        """
        assert self._source is not None
        names = self._source.specs
        if self._by_path:
            wanted: Mapping[str, tuple[str, ...]] = {path: (path,) for path in self._specs}
        else:
            wanted = self._mapping.names
        known = {name for group in wanted.values() for name in group}
        unknown = [name for name in names if name not in known and not self._tolerated(name)]
        self.ignored = [self.said(name) for name in names if name not in known]
        missing: list[str] = []
        for path in self._specs:
            group = wanted.get(path, ())
            absent = [name for name in group if name not in names]
            if not group:
                continue  # no Hugging Face tensor makes this leaf, so no update changes it
            if not absent:
                self.parts[path] = group
            elif self._strict or len(absent) < len(group):
                missing += absent
            else:
                self.left.append(path)
        if not self.parts and not missing:
            raise self._nothing(list(names))
        self._complain(missing, unknown if self._strict else [], some=bool(self.parts))

    def check(self, path: str, tensors: Mapping[str, Any]) -> None:
        """
        Args:
            tensors: Something with `shape` and `dtype` for each of the names that make this leaf.

        Raises:
            InvalidWeights: A tensor has the wrong shape, or a dtype that cannot be cast.
        """
        spec = self._specs[path]
        by_path = self._by_path
        expected = spec.shape if by_path else self._mapping.source_shape(path)
        for name, tensor in tensors.items():
            if expected is not None and tuple(tensor.shape) != expected:
                raise InvalidWeights(
                    f"{self._where}{self.said(name)}: shape {tuple(tensor.shape)}, "
                    f"expected {expected}"
                    + ("" if by_path else f" (for the leaf {path} of shape {spec.shape})"),
                    names=[self.said(name)],
                )
            if not convertible(tensor.dtype, spec.dtype):
                raise InvalidWeights(
                    f"{self._where}{self.said(name)}: dtype {tensor.dtype} cannot become the "
                    f"model's {spec.dtype}",
                    names=[self.said(name)],
                )
        if expected is None:
            made = self._mapping.result_shape(path, tensors)
            if made != spec.shape:
                raise InvalidWeights(
                    f"{self._where}{listed(list(tensors))}: would make {path} of shape {made}, "
                    f"but the leaf has shape {spec.shape}",
                    names=list(tensors),
                )

    def forget_source(self) -> None:
        """Drop the source and its arrays."""
        self._source = None

    # For a stream, which cannot be read ahead

    def unknown(self, name: str) -> None:
        """Take a tensor that makes no leaf.

        Raises:
            InvalidWeights: The update is strict, and it does not tolerate this tensor.
        """
        self.ignored.append(name)
        if self._strict and not self._tolerated(name):
            self._complain([], [name])

    def ended(self, done: Collection[str], waiting: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that nothing is missing, after the last tensor.

        Args:
            done: The leaves that were made.
            waiting: The tensors of incomplete leaves, by leaf.

        Raises:
            InvalidWeights: A tensor is missing, or no tensor was the model's.
        """
        self.left = [path for path in self._specs if path not in done]
        missing = [
            name
            for path, names in self._mapping.names.items()
            if path not in done and (self._strict or path in waiting)
            for name in names
            if name not in waiting.get(path, ())
        ]
        self._complain(missing, [])
        if not done:
            raise self._nothing(self.ignored)

    def said(self, name: str) -> str:
        """The caller's own name for a tensor."""
        return self._origins.get(name, name)

    def _tolerated(self, name: str) -> bool:
        tied = name == HEAD and "lm_head.embedding" not in self._specs
        return tied or name.endswith(_TOLERATED) or name.startswith(self._left_out)

    def _nothing(self, names: Sequence[str]) -> InvalidWeights:
        """The error of a source that changes no leaf."""
        if not names:
            return InvalidWeights(f"{self._where}the source is empty")
        said = f"none of the names is one of the model's: {listed(names)}"
        return InvalidWeights(f"{self._where}{said}", names=names)

    def _complain(
        self, missing: Sequence[str], unknown: Sequence[str], *, some: bool = True
    ) -> None:
        if missing or unknown:
            part = self._strict and some and self._opening is None
            subject = self._opening or "update_weights: the source"
            unknown = [self.said(name) for name in unknown]
            said = mismatch(str(subject), missing, unknown, part=part)
            raise InvalidWeights(said, names=[*missing, *unknown])
