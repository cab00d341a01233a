"""Makes a model's leaves from Hugging Face tensors, by upstream's WeightLoader fed from memory.

Every model's `load_weights` makes a WeightLoader and gives it a mapping. Here that function runs
with our subclass, which keeps the mapping. For one leaf at a time it runs upstream's transposes,
reshapes, stacking and head padding on a caller's arrays. It reads no file and changes no model.

Reaches into upstream's WeightLoader (`_scan_weight_info`, `_create_lazy_tensors`,
`_create_stacked_moe_lazy_tensor`, `_get_param` and `_shard_weight` are overridden and probed), and
into its models, whose `load_weights` runs with another WeightLoader among its globals.

What breaks: A trainer's tensors with Hugging Face names cannot become a model's leaves.
Why: Upstream converts files only, straight into a model.
Remove when: Upstream's loader takes tensors, and returns leaves.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.utils.weight_utils import WeightLoader, WeightMapping

from enginepool.errors import EnginePoolError
from enginepool.process.host_state import no_progress_bars
from enginepool.process.upstream import expect
from enginepool.weights.arrays import jax_dtype, outside_meshes
from enginepool.weights.converters import Converter, stack, traced
from enginepool.weights.placement import place

# Puts the tensor of this name into the sharding that a step of the conversion wants.
Put = Callable[[str, Sharding], jax.Array]

_OVERRIDDEN = (
    "load_weights_from_safetensors",
    "_scan_weight_info",
    "_create_lazy_tensors",
    "_create_stacked_moe_lazy_tensor",
    "_get_param",
    "_shard_weight",
)
_REMEDY = "Hugging Face names cannot be mapped; update_weights takes an nnx.State or leaves"

_GROUP = "__MOE_EXPERTS__"  # upstream's mark of a leaf that is stacked from many tensors


class HuggingFaceMapping:
    """Maps Hugging Face tensors to the leaves of one engine's model, and converts them.

    Attributes:
        names: For each leaf path, the names of the tensors that it is made of.
        paths: For each tensor name, the leaf path.
        directory: The checkpoint. Upstream has replaced a hub id by it.
    """

    def __init__(
        self,
        model: Any,
        model_config: ModelConfig,
        specs: Mapping[str, jax.ShapeDtypeStruct],
        load_weights: Any = None,
    ) -> None:
        """
        Args:
            load_weights: The method of the model's own class, while that class is replaced.
        """
        expect(WeightLoader, *_OVERRIDDEN, remedy=_REMEDY)
        self.directory = Path(model_config.model_path)
        self._specs = specs
        load_weights = load_weights or type(model).load_weights
        self._loader, mapping = _capture(model, model_config, load_weights)
        self._entries: dict[str, tuple[str, Any]] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        for key, entry in mapping.items():
            path, names = _targets(key, entry)
            if path in specs:  # upstream also maps biases that a model does not have
                self._entries[path], self.names[path] = (key, entry), names
        self.paths = {name: path for path, names in self.names.items() for name in names}
        self._kinds: dict[str, Any] = {}
        self._shapes: dict[Any, tuple[int, ...] | None] = {}
        self._kept: dict[str, bool] = {}
        self._converters: dict[Any, Converter | None] = {}

    def convert(self, path: str, shapes: Mapping[str, Any], put: Put) -> jax.Array:
        """Make a leaf from its tensors step by step, in the model's dtype and sharding. Needed if
        no single program can make it (an engine of several devices).

        Args:
            shapes: Something with `shape` and `dtype` for each of the leaf's names.
            put: Called once for each name, and again if upstream falls back to its slow path.
        """
        with jax.set_mesh(self._loader.mesh):
            value = self._feed(path, shapes, put)
        # Upstream puts stacked experts on another mesh. The leaf's own sharding counts.
        sharding = self._specs[path].sharding
        assert sharding is not None
        return place(value, sharding, value.dtype)

    def converter(self, path: str, shapes: Mapping[str, Any]) -> Converter | None:
        """The converter that makes a leaf from its tensors, in the order of `names`. None if
        upstream's conversion cannot be traced."""
        names = self.names[path]
        tensors = [(tuple(shapes[name].shape), jax_dtype(shapes[name].dtype)) for name in names]
        like = (self.kind(path), *tensors)
        if like not in self._converters:
            try:
                self._converters[like] = self._traced(path, tensors)
            except Exception:  # whatever upstream raises while it is traced
                self._converters[like] = None
        return self._converters[like]

    def _feed(self, path: str, shapes: Mapping[str, Any], put: Put) -> jax.Array:
        with no_progress_bars():
            return self._loader.feed(self._entries[path], path, self._specs[path], shapes, put)

    def turned(self, path: str) -> bool:
        """Whether the leaf is its tensors with the last two axes exchanged."""
        return bool(getattr(self._entries[path][1], "transpose", False))

    def source_shape(self, path: str) -> tuple[int, ...] | None:
        """The shape that each tensor of this leaf must have; None if it is not known."""
        kind = self.kind(path)
        if kind not in self._shapes:
            self._shapes[kind] = self._find_shape(path, self._specs[path])
        return self._shapes[kind]

    def keeps(self, path: str) -> bool:
        """Whether the leaf is its only tensor, unchanged except for the dtype."""
        if path not in self._kept:
            spec = self._specs[path]
            alike = len(self.names[path]) == 1 and self.source_shape(path) == spec.shape
            made = self.converter(path, dict.fromkeys(self.names[path], spec)) if alike else None
            self._kept[path] = made is not None and made.does_nothing
        return self._kept[path]

    def kind(self, path: str) -> Any:
        """A key for the leaf's conversion. It is equal for layers that are converted alike."""
        if path not in self._kinds:
            fields = {k: v for k, v in vars(self._entries[path][1]).items() if k != "target_path"}
            name = tuple(path.split(".")[-2:])  # upstream looks at names too
            self._kinds[path] = str(fields), self._specs[path].shape, len(self.names[path]), name
        return self._kinds[path]

    def result_shape(self, path: str, shapes: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of the leaf that these tensors would make. Traces upstream's conversion.

        Raises what upstream raises for tensors that it cannot use.
        """
        tensors = [(shapes[name].shape, jax_dtype(shapes[name].dtype)) for name in self.names[path]]
        return self._traced(path, tensors).shape

    def _traced(self, path: str, tensors: Sequence[Any]) -> Converter:
        names = self.names[path]
        specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in tensors]
        shapes = dict(zip(names, specs, strict=True))

        def make(*arrays: jax.Array) -> jax.Array:
            given = dict(zip(names, arrays, strict=True))
            return self._feed(path, shapes, lambda name, sharding: given[name])

        with outside_meshes():
            return traced(make, specs)

    def _find_shape(self, path: str, spec: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
        shape = spec.shape[1:] if len(self.names[path]) > 1 else spec.shape
        for guess in (shape[:-2] + shape[-2:][::-1], shape):
            tensor = jax.ShapeDtypeStruct(guess, spec.dtype)
            try:
                result = self.result_shape(path, dict.fromkeys(self.names[path], tensor))
            except Exception:  # whatever upstream raises for a tensor that it cannot use
                continue
            if result == spec.shape:
                return guess
        return None


class _Captured(Exception):
    """Raised inside a model's `load_weights`. It carries the loader and its mapping out."""


class _FedLoader(WeightLoader):
    """Upstream's loader, which reads tensors from a caller and returns leaves to it."""

    _shapes: Mapping[str, Any]
    _put: Put
    _slot: Any

    def load_weights_from_safetensors(self, weight_mappings: Any, *args: Any, **kw: Any) -> None:
        raise _Captured(self, weight_mappings)

    def feed(
        self,
        entry: tuple[str, Any],
        path: str,
        spec: jax.ShapeDtypeStruct,
        shapes: Mapping[str, Any],
        put: Put,
    ) -> jax.Array:
        self._shapes, self._put = shapes, put
        self._slot = types.SimpleNamespace(value=spec)
        # Upstream finds a model's leaves through `_get_param`, which returns the slot here. So an
        # empty model is enough.
        self.model = nnx.Module()
        self.dummy_mode = False
        super().load_weights_from_safetensors(dict([entry]))
        value = self._slot.value
        del self._shapes, self._put, self._slot
        if value is spec:
            raise EnginePoolError(f"upstream's loader made nothing for {path}")
        return value

    def _scan_weight_info(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [{"file": name, "shape": tuple(tensor.shape), "dtype": "F32"}]
            for name, tensor in self._shapes.items()
        }

    def _get_param(self, params: Any, path: str) -> Any:
        return self._slot

    def _shard_weight(self, weight: jax.Array, sharding_spec: Any, mesh: Any = None) -> jax.Array:
        if isinstance(weight, Tracer):  # a converter does not place leaves
            return weight
        # Upstream's device_put copies an array through the host if several chips share it.
        target = NamedSharding(mesh or self.mesh, PartitionSpec(*sharding_spec))
        return place(weight, target, weight.dtype)

    def _create_lazy_tensors(
        self,
        hf_key: str,
        infos: Any,
        file_manager: Any,
        target_sharding: NamedSharding | None = None,
    ) -> list[jax.Array]:
        return [self._put(hf_key, target_sharding or NamedSharding(self.mesh, PartitionSpec()))]

    def _create_stacked_moe_lazy_tensor(
        self,
        expected_hf_keys: Sequence[str],
        weight_info: Any,
        file_manager: Any,
        do_transpose: bool = False,
        target_sharding: NamedSharding | None = None,
        physical_to_logical_map: Any = None,
    ) -> jax.Array:
        if physical_to_logical_map is not None:
            raise EnginePoolError("redundant experts are not supported by update_weights")
        # Stacked on the engine's own mesh; `convert` then puts it into the leaf's sharding.
        whole = NamedSharding(self.mesh, PartitionSpec())
        stacked = stack(*(self._put(key, whole) for key in expected_hf_keys))
        return stacked.swapaxes(-1, -2) if do_transpose else stacked


def _capture(
    model: nnx.Module, model_config: ModelConfig, load_weights: Any
) -> tuple[_FedLoader, dict[str, Any]]:
    """Run the model's `load_weights` with our loader in place of upstream's."""
    loading = with_loader(load_weights, _FedLoader)
    try:
        if loading is not None:
            loading(model, model_config)
    except _Captured as captured:
        return captured.args
    raise EnginePoolError(
        f"{type(model).__name__} does not load through upstream's WeightLoader: Hugging Face "
        "names cannot be mapped; update_weights takes an nnx.State or a list of leaves"
    )


def with_loader(function: Any, loader: type[WeightLoader]) -> Callable[..., None] | None:
    """A model's `load_weights` with this loader in place of upstream's. None if the function does
    not use WeightLoader."""
    if "WeightLoader" not in function.__code__.co_names:
        return None
    names = {**function.__globals__, "WeightLoader": loader}
    return types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


def _targets(key: str, entry: Any) -> tuple[str, tuple[str, ...]]:
    """The leaf path of a mapping entry, and the names of the leaf's tensors."""
    target = entry.target_path if isinstance(entry, WeightMapping) else entry
    if key.startswith(_GROUP):
        return target[0], tuple(target[1:])
    if "*" in key or not isinstance(target, str):
        raise EnginePoolError(
            f"update_weights does not know this model's mapping of {key!r}; it takes an "
            "nnx.State or a list of leaves"
        )
    return target, (key,)
