"""Checks that a checkpoint fits the model of a new engine, and reads it into the model.

Reaches into upstream's WeightLoader: `_scan_weight_info` and `_get_param` are overridden.

What breaks: Upstream reads every *.safetensors of a directory, whatever its index says. It logs a
tensor that is missing or has another name, and accepts any shape. The engine then serves its
initial values.
Why: Upstream's loader reads the tensors that it finds, and does not check which are missing.
Remove when: Upstream reads the files that an index names, and refuses tensors that do not fit. A
model that does not load through WeightLoader is read unchecked, and a warning is logged.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.utils.weight_utils import WeightLoader

from enginepool.errors import EnginePoolError, InvalidConfig, InvalidWeights
from enginepool.logs import logger
from enginepool.weights.checkpoint import Checkpoint, layers_left_out
from enginepool.weights.fit import Fit
from enginepool.weights.mapping import HuggingFaceMapping, with_loader
from enginepool.weights.name_mismatch import listed
from enginepool.weights.quantized import Quantization, Slot, specs_of
from enginepool.weights.sources import Source
from enginepool.weights.tied import HEAD, TiedHead

if TYPE_CHECKING:
    from sgl_jax.srt.configs.model_config import ModelConfig

# Rows of a head that are compared with the embedding. An untied head differs in every row.
_ROWS = 32


def read(
    model: nnx.Module,
    load_weights: Callable[..., None],
    model_config: ModelConfig,
    check: Callable[[], None],
    quantization: Quantization | None = None,
) -> None:
    """Fill a model that was made without values.

    Args:
        load_weights: The method of the model's own class.
        check: Called after upstream gave its mapping, before tensors are compared with the model.
        quantization: The quantizers of the checkpoint's matrices, if the model is quantized while
            it is read.

    Raises:
        InvalidWeights: The checkpoint does not fit, or was changed while it was read.
        InvalidConfig: The checkpoint is quantized, and this model reads no quantized weights.
    """
    checkpoint = Checkpoint(Path(model_config.model_path))
    loading = with_loader(load_weights, _reading(checkpoint.places(), quantization))
    if loading is None:
        _warn(model, "it does not load through upstream's WeightLoader")
    else:
        own = specs_of(model)
        _check(
            checkpoint,
            model,
            own if quantization is None else quantization.specs(own),
            load_weights,
            model_config,
            check,
        )
    try:
        (loading or load_weights)(model, model_config)
    finally:  # upstream may fail because a file is gone or half written
        checkpoint.check_unchanged()
    values = specs_of(model).items()
    empty = [path for path, value in values if isinstance(value, jax.ShapeDtypeStruct)]
    if empty and not _quantized(model_config):
        raise InvalidWeights(
            f"{checkpoint.directory}: nothing was read for leaves of the model, {listed(empty)}",
            names=empty,
        )


def mapped(model: nnx.Module, model_config: ModelConfig, specs: Any, own: Any) -> set[str]:
    """The leaves that a checkpoint's tensors make; none if upstream's mapping is not known.

    Args:
        own: The method `load_weights` of the model's own class.
    """
    try:
        return set(HuggingFaceMapping(model, model_config, specs, own).names)
    except EnginePoolError:
        return set()


def _reading(places: dict[str, Any], quantization: Quantization | None) -> type[WeightLoader]:
    class Reading(WeightLoader):
        def _scan_weight_info(self) -> dict[str, Any]:
            return places

        def _get_param(self, params: Any, path: str) -> Any:
            find = super()._get_param
            if quantization is None or (quantizer := quantization.of.get(path)) is None:
                return find(params, path)
            integers, scales = (find(params, leaf) for leaf in quantizer.leaves)
            return Slot(quantizer, integers, scales, quantization.errors)

    return Reading


def _check(
    checkpoint: Checkpoint,
    model: nnx.Module,
    leaves: Mapping[str, Any],
    load_weights: Any,
    model_config: ModelConfig,
    check: Callable[[], None],
) -> None:
    """Check names, shapes and dtypes, by the files' headers alone."""
    specs: dict[str, Any] = {path: value for path, value in leaves.items() if value.shape}
    try:
        mapping = HuggingFaceMapping(model, model_config, specs, load_weights)
    except EnginePoolError as error:
        _warn(model, str(error))
        return
    check()
    there = checkpoint.specs
    # Shapes and extra tensors of a quantized checkpoint are known to upstream's code alone.
    quantized = _quantized(model_config)
    if quantized:
        _check_places(checkpoint.directory, model, specs, mapping)
        there = {name: spec for name, spec in there.items() if name in mapping.paths}
    left_out = layers_left_out(checkpoint.directory, model_config.hf_config.num_hidden_layers)
    source = Source(False, there, checkpoint.load, left_out=left_out)
    fit = Fit(source, specs, mapping, strict=True, opening=checkpoint.directory)
    fit.resolve()
    if quantized:
        return
    for path, names in fit.parts.items():
        fit.check(path, {name: there[name] for name in names})
    tied = TiedHead(specs)
    if HEAD in there and tied.path is not None:
        (embedding,) = fit.parts[tied.path]
        _compare(checkpoint, tied, embedding)


def _check_places(directory: Path, model: nnx.Module, specs: Any, mapping: Any) -> None:
    """Check that the model reads its quantized matrices. Upstream makes them in every model."""
    empty = [path for path in specs if path.endswith(".weight_q") and path not in mapping.names]
    if empty:
        raise InvalidConfig(
            f"{directory}: config.json: quantization_config: {_class(model)} of this "
            f"sglang-jax reads no quantized weights, {listed(empty, 'weight')}; give weights that "
            "are not quantized"
        )


def _compare(checkpoint: Checkpoint, tied: TiedHead, embedding: str) -> None:
    """Compare a head with its tied embedding: a few rows, so that neither is read a second time."""
    shape = checkpoint.specs[HEAD].shape
    same = shape == checkpoint.specs[embedding].shape
    for row in np.unique(np.linspace(0, shape[0] - 1, _ROWS).astype(int)) if same else ():
        rows = slice(int(row), int(row) + 1)
        same &= tied.equal(checkpoint.load(HEAD, rows), checkpoint.load(embedding, rows))
    if not same:
        raise InvalidWeights(
            f"{checkpoint.directory}: {HEAD} differs from {embedding}, and this model has one "
            f"matrix for both; set tie_word_embeddings to false in config.json, or remove {HEAD}",
            names=[HEAD],
        )


def _quantized(model_config: ModelConfig) -> bool:
    """Whether the files have quantized weights, as upstream reads the configuration."""
    found = getattr(model_config, "quantization_config", None)
    return found is not None and found.is_static_checkpoint


def _warn(model: nnx.Module, why: str) -> None:
    logger().warning("enginepool.weights_not_checked", model=_class(model), why=why)


def _class(model: nnx.Module) -> str:
    """The name of upstream's class. The model has a subclass of ours while it is read."""
    return getattr(type(model), "replaced_class", type(model)).__name__
