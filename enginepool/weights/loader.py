"""Loads an engine's weights. The first engine checks and reads the checkpoint; later engines copy.

Upstream's `load_format` may be a loader class. Ours inherits from upstream's loader, which makes
the model. The model's `load_weights` is replaced while the loader runs.

Reaches into upstream's loader (`_initialize_model` and, where there is one,
`_warmup_safetensors_cache`), and changes the class of the model that it has made.

What breaks: Every engine of a pool reads the checkpoint from the disk: four engines read it four
times. A checkpoint that does not fit the model is not refused (`reading.py`).
Why: Upstream's loader makes a model, and the model reads its files. It takes no arrays. A subclass
of the model's class can replace `load_weights`.
Remove when: Upstream's loader takes arrays.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding
from sgl_jax.srt.configs.load_config import LoadConfig
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.model_loader.loader import JAXModelLoader

from enginepool.process.upstream import expect_parameters
from enginepool.weights.leaves import EngineLeaves
from enginepool.weights.placement import place
from enginepool.weights.quantized import Quantization, mark_quantized, quantize_model
from enginepool.weights.reading import mapped, read


class _Loading(NamedTuple):
    """The load that runs in this thread.

    Attributes:
        source: The weights to copy; None if the checkpoint is read.
        mesh: The mesh of the engine that loads.
        check: Called before weights are read, if the model loads through upstream's WeightLoader.
        reading: Entered while the weights are read or copied.
        dummy: Whether the model gets placeholders instead of weights.
        quantized: Gets the quantizers of the model's matrices.
    """

    source: EngineLeaves | None
    mesh: Mesh
    check: Callable[[], None]
    reading: Callable[[], AbstractContextManager[object]]
    dummy: bool
    quantized: list[Quantization]


_loading: ContextVar[_Loading] = ContextVar("loading")


def loader_for(
    mesh: Mesh,
    source: EngineLeaves | None = None,
    check: Callable[[], None] = lambda: None,
    reading: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    dummy: bool = False,
) -> type[JAXModelLoader]:
    """A loader class for an engine on this mesh, for upstream's `load_format`.

    With `source`, the leaves are copies of that engine's, sharded over this mesh in the same way.
    A model that upstream quantizes reads the checkpoint itself. So does a model that derives
    weights while it loads, because an empty model does not have these leaves yet.

    Args:
        check: Raises if the model may not be loaded.
        reading: Entered while the weights are read or copied.
        dummy: Whether the model gets placeholders instead of weights.
    """
    expect_parameters(JAXModelLoader.__init__, "load_config", "mesh")
    expect_parameters(JAXModelLoader._initialize_model, "model_config")
    expect_parameters(JAXModelLoader.load_model, "model_config")

    class Loader(JAXModelLoader):
        quantization: Quantization | None = None

        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(load_config, mesh)

        def _initialize_model(self, model_config: ModelConfig) -> Any:
            return _loading_class(super()._initialize_model(model_config))

        def load_model(self, model_config: ModelConfig) -> nnx.Module:
            made: list[Quantization] = []
            token = _loading.set(_Loading(source, mesh, check, reading, dummy, made))
            try:
                model = super().load_model(model_config)
            finally:
                _loading.reset(token)
            if made:
                (self.quantization,) = made
                mark_quantized(model_config)
            # The model gets its own class back. By a plain assignment, nnx would store `__class__`
            # as an attribute, and the model would differ from the one that it copies.
            own = getattr(type(model), "replaced_class", type(model))
            object.__setattr__(model, "__class__", own)
            return model

    class SiblingLoader(Loader):
        @staticmethod
        def _warmup_safetensors_cache(model_config: ModelConfig) -> None:
            """Do nothing. Upstream would read the files once more here, to cache them."""

    return Loader if source is None and not dummy else SiblingLoader


@functools.cache  # one for each class of model, because JAX keeps every class that it has seen
def _loading_class(model_class: Any) -> Any:
    class Model(model_class):
        replaced_class = model_class

        def load_weights(self, model_config: ModelConfig) -> None:
            source, mesh, check, reading, dummy, quantized = _loading.get()
            own = model_class.load_weights
            quantization = quantize_model(
                self, model_config, lambda specs: mapped(self, model_config, specs, own)
            )
            quantized += [quantization] if quantization is not None else []
            with reading():
                if dummy:
                    _fill(self, own, model_config, mesh)
                elif source is None or not _copy(self, source, mesh):
                    read(self, own, model_config, check, quantization)

    return Model


def _fill(
    model: nnx.Module, load_weights: Callable[..., None], model_config: Any, mesh: Mesh
) -> None:
    """Fill a model with placeholders, as upstream's dummy loader does."""
    model_config._dummy_mode = True
    load_weights(model, model_config)
    # Upstream fills the leaves that its mapping names. Quantized matrices are not among them.
    state = nnx.state(model)
    for _, variable in nnx.to_flat_state(state):
        spec: Any = variable.get_value()
        if isinstance(spec, jax.ShapeDtypeStruct):
            there = NamedSharding(mesh, spec.sharding.spec)
            make = functools.partial(jnp.zeros, spec.shape, spec.dtype)
            variable.set_value(jax.jit(make, out_shardings=there)())
    nnx.update(model, state)


def _copy(model: nnx.Module, source: EngineLeaves, mesh: Mesh) -> bool:
    """Fill an empty model with copies. False if they do not fit; the model is still empty then."""
    state = nnx.state(model)
    variables = {".".join(map(str, path)): each for path, each in nnx.to_flat_state(state)}
    wanted = {path: (each.shape, each.dtype) for path, each in variables.items()}
    there = {path: (spec.shape, spec.dtype) for path, spec in source.specs.items()}
    devices = dict(zip(source.devices, mesh.devices.flat, strict=True))
    shardings = {path: _moved(spec.sharding, devices) for path, spec in source.specs.items()}
    by_upstream = source.quantized and source.quantization is None
    if by_upstream or wanted != there or None in shardings.values():
        return False
    for path, variable in variables.items():
        sharding: Any = shardings[path]
        variable.set_value(place(source[path], sharding, variable.dtype))
    nnx.update(model, state)
    jax.block_until_ready(nnx.state(model))
    return True


def _moved(sharding: Sharding | None, devices: Mapping[Any, Any]) -> Sharding | None:
    """The same sharding on other devices; None if it is no NamedSharding of a concrete mesh."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    old = sharding.mesh
    moved = np.array([devices[device] for device in old.devices.flat]).reshape(old.devices.shape)
    mesh = Mesh(moved, old.axis_names, axis_types=old.axis_types)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
