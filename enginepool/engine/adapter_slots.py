"""The adapter slots of one engine: which adapter each holds, and which slot each row uses.

Reaches into upstream's batches: an extend batch gets a slot and a scale for each token.

What breaks: Upstream's batches name the adapters of upstream's own manager.
Why: See `lora/layers.py`.
Remove when: With `lora/layers.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.engine.common_programs import OnAnyDevice
from enginepool.engine.executable_cache import common_programs
from enginepool.errors import InvalidWeights
from enginepool.lora.adapter import NO_SLOT, Adapter
from enginepool.lora.layers import layers_by_kind
from enginepool.weights.placement import place

if TYPE_CHECKING:
    from flax import nnx

    from enginepool.weights.leaves import EngineLeaves

# An adapter on an engine's device: A and B by the layer's path, padded to a slot's size.
type Placed = Mapping[str, tuple[jax.Array, jax.Array]]


class AdapterSlots:
    """The adapters that an engine's device has. Used on the engine's thread, except `held`,
    `check_finite` and `place`.

    Attributes:
        layers: The input and output size of each layer that adapters can change, by path.
        count: How many slots there are.
        rank: The highest rank of an adapter.
    """

    def __init__(self, model: nnx.Module, leaves: EngineLeaves) -> None:
        self.layers: dict[str, tuple[int, int]] = {}
        self._leaves = leaves
        # The layers of each leaf, in the leaf's order.
        self._layers_of: dict[str, list[str]] = {}
        # The shape of one slot, by layer and side.
        self._specs: dict[tuple[str, str], jax.ShapeDtypeStruct] = {}
        for same in layers_by_kind(model):
            layer = next(iter(same.values()))
            _, self.count, self.rank, size_in = layer.lora_A.shape
            self.layers |= dict.fromkeys(same, (size_in, layer.lora_B.shape[2]))
            for side in ("lora_A", "lora_B"):
                # Layers of one kind share a leaf. The model lists it under the first of them.
                leaf = next(f"{p}.{side}" for p in same if f"{p}.{side}" in leaves.adapter_specs)
                self._layers_of[leaf] = list(same)
                spec = _of_one_slot(leaves.adapter_specs[leaf])
                self._specs |= {(path, side): spec for path in same}
        # By number, least recently used first.
        self._held: OrderedDict[int, tuple[int, Adapter]] = OrderedDict()
        self._write = common_programs().common(["write_adapter"], _build_write)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the adapters in slots, least recently used first."""
        return list(self._held)

    def held(self) -> list[Adapter]:
        """The adapters in slots. Any thread."""
        return [adapter for _, adapter in list(self._held.values())]

    def row(self, adapter: Adapter | None) -> tuple[int, float]:
        """The slot and the scale of an adapter's rows. The adapter must be in a slot."""
        if adapter is None:
            return NO_SLOT, 0.0
        return self._held[adapter.number][0], adapter.scale

    def check_finite(self, arrays: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Refuse NaN and infinity, which would spread to rows of other adapters.

        Raises:
            InvalidWeights: An adapter has some, or has too large numbers for the slots' dtype.
        """
        for path, sides in arrays.items():
            for side, array in zip(("lora_A", "lora_B"), sides, strict=True):
                dtype = self._specs[path, side].dtype
                with np.errstate(over="ignore", invalid="ignore"):
                    finite = np.isfinite(array.astype(dtype, copy=False)).all()
                if not finite:
                    raise InvalidWeights(
                        f"{path}.{side}: NaN, infinity, or a number too large for {dtype}",
                        names=[f"{path}.{side}"],
                    )

    def place(self, arrays: Mapping[str, tuple[Any, Any]]) -> Placed:
        """Put an adapter on the engine's device, beside the slots."""
        return {
            path: (
                self._padded(self._specs[path, "lora_A"], a, (0, self.rank - a.shape[0])),
                self._padded(self._specs[path, "lora_B"], b, (1, self.rank - b.shape[1])),
            )
            for path, (a, b) in arrays.items()
        }

    @staticmethod
    def _padded(spec: jax.ShapeDtypeStruct, array: Any, more: tuple[int, int]) -> jax.Array:
        axis, count = more
        pads = [(0, count if at == axis else 0) for at in range(2)]
        if isinstance(array, np.ndarray):
            padded = np.pad(array.astype(spec.dtype, copy=False), pads)
            return place(padded, spec.sharding, spec.dtype)
        placed = place(array, spec.sharding, spec.dtype)
        return jnp.pad(placed, pads) if count else placed

    def load(self, adapter: Adapter, in_use: Collection[int], placed: Placed | None = None) -> bool:
        """Put an adapter into a slot, if it is in none.

        Args:
            in_use: The numbers of adapters that must stay.
            placed: The adapter, if it is on the device already.

        Returns:
            False if every slot is in use.
        """
        if adapter.number in self._held:
            self._held.move_to_end(adapter.number)
            return True
        slot = self._free_slot(in_use)
        if slot is None:
            return False
        self._put(slot, adapter, placed)
        return True

    def replace(self, numbers: Collection[int], adapter: Adapter, placed: Placed | None) -> None:
        """Put an adapter into the slot of an older version. `numbers` are those of its older
        versions. At least one of them has a slot."""
        slots = [self._held.pop(number)[0] for number in numbers if number in self._held]
        self._put(slots[0], adapter, placed)

    def forget(self, number: int) -> None:
        """Free an adapter's slot, if it has one."""
        self._held.pop(number, None)

    def renew(self) -> None:
        """Free all slots, and make new leaves: a failed write may have consumed the old ones."""
        self._held.clear()
        specs = self._leaves.adapter_specs.items()
        self._leaves.put_adapters({path: self._zeros(spec) for path, spec in specs})

    def compile(self) -> None:
        """Compile what loads an adapter, by loading zeros into a slot that no request uses."""
        nothing = {
            path: (np.zeros((1, size_in)), np.zeros((size_out, 1)))
            for path, (size_in, size_out) in self.layers.items()
        }
        self._write_slot(0, self.place(nothing))

    def _free_slot(self, in_use: Collection[int]) -> int | None:
        taken = {slot for slot, _ in self._held.values()}
        if free := sorted(set(range(self.count)) - taken):
            return free[0]
        for number in self._held:
            if number not in in_use:
                return self._held.pop(number)[0]
        return None

    def _put(self, slot: int, adapter: Adapter, placed: Placed | None) -> None:
        self._write_slot(slot, placed or self.place(adapter.arrays))
        self._held[adapter.number] = slot, adapter

    def _write_slot(self, slot: int, placed: Placed) -> None:
        """Write a slot. Layers that the adapter does not change get zeros."""
        new = {}
        for leaf, paths in self._layers_of.items():
            side = leaf.rpartition(".")[2]
            which = 0 if side == "lora_A" else 1
            new[leaf] = [
                placed[path][which] if path in placed else self._zeros(self._specs[path, side])
                for path in paths
            ]
        old = {leaf: self._leaves[leaf] for leaf in new}
        self._leaves.put_adapters(self._write(old, new, np.int32(slot)))

    @staticmethod
    def _zeros(spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(jnp.zeros(spec.shape, spec.dtype), spec.sharding)

    # Batches

    def prepare(self, batch: Any, find: Callable[[str], Adapter | None]) -> None:
        """Give one of upstream's batches its slots and scales.

        Args:
            find: The adapter of one of upstream's requests, by `lora_id`.
        """
        rows = [self.row(find(each)) for each in batch.lora_ids]
        lengths = None
        if batch.forward_mode.is_extend():
            lengths = np.asarray(batch.extend_seq_lens)
        self.fill(batch, rows[: None if lengths is None else len(lengths)], lengths)

    @staticmethod
    def fill(batch: Any, rows: Sequence[tuple[int, float]], lengths: Any) -> None:
        """Do what `prepare` does, for rows whose slots and scales are known.

        Args:
            lengths: How many tokens each row has. None: each has one.
        """
        slots = np.full(len(batch.input_ids), NO_SLOT, np.int32)
        scales = np.zeros(len(batch.input_ids), np.float32)
        counts = np.ones(len(rows), np.int64) if lengths is None else lengths[: len(rows)]
        mine = np.repeat(np.array([slot for slot, _ in rows], np.int32), counts)
        slots[: len(mine)] = mine
        scales[: len(mine)] = np.repeat(np.array([s for _, s in rows], np.float32), counts)
        batch.lora_token_indices, batch.lora_scalings = slots, scales
        batch.lora_ranks = slots  # upstream sends it, and nobody reads it


def _of_one_slot(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The part of the leaf that one layer has in one slot."""
    assert isinstance(leaf.sharding, NamedSharding)
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[2:]))
    return jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype, sharding=sharding)


def _with(leaf: jax.Array, layers: Sequence[jax.Array], slot: jax.Array) -> jax.Array:
    """Write the layers one after the other. XLA then writes in place, without an array of all
    layers."""
    for index, one in enumerate(layers):
        where = index, slot, *(0,) * one.ndim
        leaf = jax.lax.dynamic_update_slice(leaf, one[None, None], where)
    return leaf


def _build_write() -> Any:
    @partial(jax.jit, donate_argnames="leaves")
    def write_adapter(leaves: Any, new: Any, slot: jax.Array) -> Any:
        return {path: _with(leaf, new[path], slot) for path, leaf in leaves.items()}

    return OnAnyDevice(write_adapter)
