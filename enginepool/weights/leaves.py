"""An engine's weights: the leaves that its programs read, by the model's own paths.

Reaches into upstream's model runner. Every forward reads `model_state_leaves`. `model` holds the
same arrays in nnx Variables, for other readers and for a later split of the model. Both are always
replaced together.

What breaks: New values that are written into the model alone are not used.
Why: The model is split into graph and leaves once, when the runner is made.
Remove when: Upstream replaces weights by itself, from arrays. A runner is refused if its leaves and
its Variables are not the same arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from enginepool.errors import EnginePoolError
from enginepool.process.upstream import expect
from enginepool.weights.arrays import lost

if TYPE_CHECKING:
    from enginepool.weights.quantized import Quantization


class EngineLeaves(Mapping[str, jax.Array]):
    """The leaves of one engine by dotted nnx path, in the model's order.

    Any thread may read. `replace` and `drop` may be called only between two steps of the engine.
    Adapters have leaves of their own, which this mapping does not list.

    Attributes:
        adapter_specs: The specs of the leaves that hold adapters, by path.
        source_specs: The specs of the model's leaves before it was quantized. A source of new
            weights has these leaves.
        devices: The leaves' devices, in the order of the engine's mesh.
        shared: Leaves that somebody else holds too, and may delete or donate.
    """

    def __init__(self, model_runner: Any) -> None:
        expect(model_runner, "model", "model_state_leaves", "mesh")
        self._runner: Any = model_runner
        flat = nnx.to_flat_state(nnx.state(model_runner.model))
        self._variables = {".".join(map(str, path)): variable for path, variable in flat}
        self.devices: tuple[jax.Device, ...] = tuple(model_runner.mesh.devices.flat)
        self.shared: set[str] = set()
        self._index = {path: i for i, path in enumerate(self._variables)}
        held = [variable.get_value() for variable in self._variables.values()]
        leaves = model_runner.model_state_leaves
        if len(held) != len(leaves) or any(
            a is not b for a, b in zip(held, leaves, strict=True) if isinstance(a, jax.Array)
        ):
            raise EnginePoolError(
                "this sglang-jax is not supported: a model's Variables do not hold the arrays of "
                "its runner's model_state_leaves, in the same order"
            )
        # Quantized models have 8-bit leaves and placeholders among them.
        self.quantized = [
            path
            for path, array in zip(self._index, held, strict=True)
            if not _is_weight(array) or array.dtype.itemsize < 2
        ]
        specs = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for path, array in zip(self._index, held, strict=True)
            if _is_weight(array)
        }
        self.specs = {path: spec for path, spec in specs.items() if not _of_adapters(path)}
        self.adapter_specs = {path: spec for path, spec in specs.items() if _of_adapters(path)}
        # Upstream's own loaders have no such attribute.
        loader = getattr(model_runner, "model_loader", None)
        self.quantization: Quantization | None = getattr(loader, "quantization", None)
        known = self.quantization
        self.source_specs = self.specs if known is None else known.specs(self.specs)

    def __getitem__(self, path: str) -> jax.Array:
        if self._runner is None:
            raise LookupError(f"{path}: the engine was taken apart")
        return self._runner.model_state_leaves[self._index[path]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def on_host(self, path: str, arrays: Mapping[str, jax.Array]) -> np.ndarray:
        """A leaf, by its path here or in `source_specs`. A quantized matrix comes as the floats
        that its integers and scales stand for.

        Args:
            arrays: All leaves, as they were at some moment.
        """
        quantizers = {} if self.quantization is None else self.quantization.of
        if path in quantizers:
            return quantizers[path].matrix(arrays)
        return np.asarray(arrays[path])

    def count(self) -> int:
        """The number of leaves that programs get, with a quantized model's placeholders."""
        return len(self._runner.model_state_leaves)

    def replace(
        self, arrays: Mapping[str, jax.Array], shared: Collection[str] = ()
    ) -> dict[str, jax.Array]:
        """Replace these leaves at once, all or none. Returns the arrays before.

        Shapes, dtypes and shardings must be those of `specs`, so no program is compiled again.

        Args:
            shared: The paths of arrays that somebody else may delete or donate.

        Raises:
            EnginePoolError: An array lies on other devices, so that every step would fail.
        """
        for path, array in arrays.items():
            wanted = self.specs[path].sharding
            assert wanted is not None
            if isinstance(array, jax.Array) and array.sharding.device_set != wanted.device_set:
                raise EnginePoolError(f"{path} lies on {array.devices()}, not on {self.devices}")
        before = self._put(arrays)
        self.shared = (self.shared - arrays.keys()) | set(shared)
        return before

    def put_adapters(self, arrays: Mapping[str, jax.Array]) -> None:
        """Put leaves of adapters in place, at once."""
        self._put(arrays)

    def _put(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        # A new list, because a running step may read the old one. It then reads one complete set.
        leaves = list(self._runner.model_state_leaves)
        before: dict[str, jax.Array] = {}
        try:
            for path, array in arrays.items():
                self._variables[path].set_value(array)
                index = self._index[path]
                before[path], leaves[index] = leaves[index], array
        except BaseException:
            for path, array in before.items():
                self._variables[path].set_value(array)
            raise
        self._runner.model_state_leaves = leaves
        return before

    def drop(self, paths: Iterator[str] | list[str]) -> dict[str, Any]:
        """Drop leaves, so that their memory can be freed. No step may run until `replace`."""
        missing: dict[str, Any] = {path: self.specs[path] for path in paths}
        return self.replace(missing)

    def forget(self) -> None:
        """Drop all leaves, with the engine. Only `specs` can be read after this.

        The Variables are emptied one by one. Listing them through flax makes a reference cycle.
        """
        self._runner = None
        for variable in self._variables.values():
            variable.set_value(None)
        self._variables.clear()

    def lost(self) -> list[str]:
        """Leaves that cannot be read: dropped here, or deleted or donated by another holder."""
        if self._runner is None:
            return list(self.specs)
        return lost(self)

    def lost_by_owner(self) -> list[str]:
        """The lost leaves, if all of them were shared. Then their other holder deleted them.
        Otherwise none."""
        lost = self.lost() if self.shared else []
        return lost if self.shared.issuperset(lost) else []


def _of_adapters(path: str) -> bool:
    return path.endswith((".lora_A", ".lora_B"))


def _is_weight(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.size > 0
