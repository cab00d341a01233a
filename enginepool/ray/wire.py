"""Messages between the driver and its hosts. Nothing here needs Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prepared:
    """One output of a call that a host has checked.

    Attributes:
        sampling_params: Those of the call. If it gave none, the checkpoint's.
        meta: The `meta_info` of its result if it ends without a token.
    """

    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One output that is begun or continued.

    Attributes:
        key: The driver's name for this attempt; another attempt has another.
        options: The call's options for one prompt, as `EnginePool.stream` takes them.
    """

    key: int
    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ErrorReply:
    """An error that a host returns and the driver raises. Ray would wrap what a host raises."""

    error: Exception


@dataclass
class News:
    """The events on a host since it was last asked.

    Attributes:
        number: A sequence number. It grows by one when `poll` returns new events. The next `poll`
            names the last one that arrived.
        finished: Results, by key.
        progress: The newest result so far of each unfinished output.
        failed: Errors in the place of results.
    """

    number: int = 0
    finished: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    progress: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished or self.progress or self.failed)

    def add(self, later: News) -> None:
        """Add later news."""
        self.number = later.number
        self.finished += later.finished
        self.failed += later.failed
        self.progress |= later.progress


@dataclass(frozen=True)
class Weights:
    """One update for all hosts.

    Attributes:
        number: Its number, from 1.
        source: A path, or a reference to a tree of `Packed` arrays in Ray's object store.
        options: `strict` and `copy`; `config_dict` of an adapter.
        lora_name: The adapter to update. None: the base.
    """

    number: int
    weight_version: int | str
    source: Any
    options: Mapping[str, Any]
    lora_name: str | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of `Host.stage` and `Host.update`. `source` is one of them, because Ray
        resolves a reference only if the reference itself is an argument."""
        return self.number, self.weight_version, self.options, self.lora_name, self.source

    def replaces(self, older: Weights) -> bool:
        """Whether a host that gets this update does not need the older one."""
        whole = self.lora_name is not None or self.options["strict"]
        return whole and self.lora_name == older.lora_name


@dataclass(frozen=True)
class Packed:
    """An array in a form that Ray moves without a copy. NumPy would copy bfloat16 while it pickles,
    so such an array is sent as integers."""

    array: np.ndarray
    dtype: str


def packed(leaf: Any) -> Any:
    """A NumPy or JAX array of numbers as `Packed`. A host gets all else as it is, and takes or
    refuses it: torch tensors, masked arrays, words."""
    import jax

    if isinstance(leaf, np.ma.MaskedArray) or not isinstance(leaf, np.ndarray | jax.Array):
        return leaf
    host = np.asarray(leaf, order="C")  # ascontiguousarray would add an axis to a scalar
    if host.dtype.kind not in "fiubV":
        return leaf
    if host.dtype.kind in "fiub":
        return Packed(host, host.dtype.name)
    return Packed(host.view(np.dtype(f"u{host.dtype.itemsize}")), host.dtype.name)


def unpacked(leaf: Any) -> Any:
    """The array, read-only where it lies in the object store."""
    import ml_dtypes

    if not isinstance(leaf, Packed):
        return leaf
    name = leaf.dtype
    return leaf.array.view(getattr(ml_dtypes, name, None) or np.dtype(name))


def pack_tree(source: Any) -> Any:
    """A caller's tree, with a `Packed` in the place of each array of numbers."""
    import jax

    return jax.tree.map(packed, source)


def unpack_tree(source: Any) -> Any:
    import jax

    return jax.tree.map(unpacked, source, is_leaf=lambda leaf: isinstance(leaf, Packed))
