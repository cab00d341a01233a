"""Refuses or logs fields of a configuration that the engines do not compute.

`refuse` needs only the configuration, and runs before anything is built. The others also need the
names of the fields that upstream has read. If upstream has not read a field that changes the model,
upstream ignores it. `refuse_unread` runs when the model is made, before its weights are read.
`check_reads` runs last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.logs import logger
from enginepool.model_config import FAMILIES
from enginepool.model_config.config_json import parsed
from enginepool.model_config.rotary import rotation
from enginepool.values import shown

# These change outputs, so they are refused if upstream does not read them. Others are logged.
_MATTERS = frozenset(
    ("attention_bias", "decoder_sparse_step", "hidden_act", "hidden_activation", "mlp_bias",
     "mlp_only_layers", "tie_word_embeddings", "use_bidirectional_attention", "use_sliding_window")
)  # fmt: skip
# Fields for training, and about the file itself.
NOT_OF_THE_MODEL = frozenset(
    ("architectures", "attention_dropout", "auto_map", "bos_token_id", "cache_implementation",
     "dtype", "id2label", "initializer_range", "label2id", "output_router_logits", "pad_token_id",
     "pretraining_tp", "router_aux_loss_coef", "tokenizer_class", "torch_dtype",
     "transformers_version", "use_cache")
)  # fmt: skip
# Also fields that are read elsewhere, and those that other fields determine.
_HARMLESS = NOT_OF_THE_MODEL | frozenset(
    ("eos_token_id", "intermediate_size", "layer_types", "max_window_layers", "model_type")
)
# For these families upstream reads `attention_bias` and loads no biases, which would keep their
# initial values.
_NO_BIASES = ("gemma2", "qwen3_moe")
_FP8 = {"compressed-tensors": "float-quantized", "compressed_tensors": "float-quantized"}


def refuse(fields: Mapping[str, Any]) -> None:
    """Refuse fields that the engines do not compute, as far as the configuration alone shows them.

    Args:
        fields: As `config_json.fields` returns them.

    Raises:
        InvalidConfig: The error has the field and its value.
    """
    _check_quantization(fields)
    family = fields.get("model_type")
    if family not in FAMILIES:
        return
    config = parsed(fields, "config.json")
    for layer in range(config.num_hidden_layers):
        rotation(vars(config), layer)
    if family in _NO_BIASES and fields.get("attention_bias"):
        raise InvalidConfig(_ignored("attention_bias", True, family))


def _check_quantization(fields: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        found = fields.get(name)
        if not found:
            continue
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        form = found.get("format") if isinstance(found, Mapping) else None
        if method != "fp8" and _FP8.get(str(method), "") != form:
            raise InvalidConfig(
                f"config.json: {name} has quant_method={shown(method)}"
                f"{f', format={shown(form)}' if form else ''}: no engine computes with such "
                "weights; give weights that are not quantized"
            )


def refuse_unread(fields: Mapping[str, Any], reads: Collection[str]) -> None:
    """Refuse fields that change outputs and that upstream has not read.

    Args:
        fields: As `config_json.fields` returns them.
        reads: The names that upstream has read.

    Raises:
        InvalidConfig: The error has the field and its value.
    """
    unread = _unread(fields, reads)
    for name in sorted(unread.keys() & _MATTERS):
        raise InvalidConfig(_ignored(name, unread[name], str(fields["model_type"])))


def check_reads(fields: Mapping[str, Any], reads: Collection[str], *, caps: bool) -> None:
    """Refuse unread fields that change outputs, and log other unread fields.

    Args:
        fields: As `config_json.fields` returns them.
        reads: The names that upstream read while it built the engine.
        caps: Whether the engine's attention computes `attn_logit_softcapping`.

    Raises:
        InvalidConfig: The error has the field and its value.
    """
    family = fields.get("model_type")
    if family not in FAMILIES:
        return
    config = parsed(fields, "config.json")
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and not caps:
        raise InvalidConfig(
            f"config.json: attn_logit_softcapping={cap!r}: native attention, which CPU and GPU "
            "have, cannot compute it; to run without it give json_model_override_args="
            "'{\"attn_logit_softcapping\": null}'"
        )
    refuse_unread(fields, reads)
    if unread := _unread(fields, reads):
        logger().warning("enginepool.config_not_read", family=family, fields=unread)


def _unread(fields: Mapping[str, Any], reads: Collection[str]) -> dict[str, Any]:
    """The fields that change the model and that upstream has not read."""
    if fields.get("model_type") not in FAMILIES:
        return {}
    config = parsed(fields, "config.json")
    neutral = vars(type(config)())
    return {
        name: value
        for name, value in fields.items()
        if name not in reads
        and name not in _HARMLESS
        and not name.startswith("_")
        and not _asks_nothing(name, value, config, neutral)
    }


def _asks_nothing(name: str, value: Any, config: Any, neutral: Mapping[str, Any]) -> bool:
    if (config.model_type, name) in (("gemma2", "hidden_act"), ("qwen2", "attention_bias")):
        return True  # Gemma's field is hidden_activation; Qwen2 has biases in any case
    if name in ("hidden_act", "hidden_activation"):
        value = {"swish": "silu"}.get(value, value)
    if name == "use_sliding_window" and value and (kinds := getattr(config, "layer_types", None)):
        return "sliding_attention" not in kinds
    return value == neutral[name] if name in neutral else not value


def _ignored(name: str, value: Any, family: str) -> str:
    return (
        f"config.json: {name}={shown(value)}: the {family} of this sglang-jax does not compute it, "
        "so outputs would be wrong"
    )
