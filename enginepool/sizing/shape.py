"""The sizes of a model's tensors, computed from its configuration: weights, and KV of a token.

It counts what upstream's model classes hold on each chip under tensor parallelism. A test compares
it with those classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from enginepool.errors import InvalidConfig
from enginepool.model_config import FAMILIES
from enginepool.model_config.config_json import load
from enginepool.sizing.quantized import itemsizes
from enginepool.values import is_int, shown

_ITEMSIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_LANES = 128  # upstream pads a head's KV to whole vector registers
_GATED_MLP = 3  # matrices: gate, up, down

# Fields of a configuration that are counts.
_COUNTS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings"),
)
_MAY_BE_NONE = ("num_key_value_heads", "head_dim", "num_experts", "sliding_window")
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")

# The part of a tensor that a decode step reads: the whole tensor, one row for each token, or some
# experts.
Role = Literal["whole", "rows", "expert"]


@dataclass(frozen=True)
class Tensor:
    """Tensors of one kind and size, of all layers together.

    Attributes:
        size: The elements of one tensor.
        sharded: Whether it is sharded over the chips of an engine. Otherwise it is replicated.
    """

    name: str
    size: int
    count: int
    itemsize: int
    sharded: bool = True
    role: Role = "whole"

    def on_chip(self, tp_size: int) -> int:
        """Bytes of all of them on one chip."""
        size = -(-self.size // tp_size) if self.sharded else self.size
        return size * self.count * self.itemsize


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide its memory.

    Attributes:
        context: The checkpoint's context in tokens.
        mlp_width: The MLP width for one token. In an MoE it is the sum over the token's experts.
        experts, experts_per_token: 0 for a dense model.
        sliding_layers, window: The number of layers that see only the last `window` tokens.
        linear_itemsize, expert_itemsize: Bytes of an element of quantized matrices. Each output of
            such a matrix has a scale in float32. None if the matrices are not quantized.
    """

    family: str
    dtype: str
    itemsize: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    context: int
    experts: int
    experts_per_token: int
    sliding_layers: int
    window: int
    tied: bool
    attention_bias: bool
    dense_layers: int
    expert_width: int
    dense_width: int
    linear_itemsize: int | None = None
    expert_itemsize: int | None = None

    def tensors(self, tp_size: int = 1) -> list[Tensor]:
        """Every parameter. If an engine has more chips than the model has KV heads, each chip holds
        one head, so K and V grow.
        """
        item, hidden, layers = self.itemsize, self.hidden, self.layers
        q = self.heads * self.head_dim
        kv = self.kv_heads_on_chip(tp_size) * tp_size * self.head_dim
        norm = 4 if self.family == "gemma2" else item  # upstream keeps Gemma's norms in float32
        linear, experts = self.linear_itemsize or item, self.expert_itemsize or item
        found = [
            Tensor(
                "embedding", self.vocab * hidden, 1, item, role="whole" if self.tied else "rows"
            ),
            Tensor("q", hidden * q, layers, linear),
            Tensor("k, v", hidden * kv, 2 * layers, linear),
            Tensor("o", q * hidden, layers, linear),
            Tensor("norms", hidden, self._norms * layers + 1, norm, sharded=False),
        ]
        if not self.tied:
            found.append(Tensor("head", self.vocab * hidden, 1, item))
        if self.attention_bias:
            found += [Tensor("q bias", q, layers, item), Tensor("k, v bias", kv, 2 * layers, item)]
            if self.family != "qwen2":
                found.append(Tensor("o bias", hidden, layers, item, sharded=False))
        if self.family in ("qwen3", "qwen3_moe"):
            found.append(Tensor("q, k norms", self.head_dim, 2 * layers, item, sharded=False))
        if self.dense_layers:
            size, count = hidden * self.dense_width, _GATED_MLP * self.dense_layers
            found.append(Tensor("mlp", size, count, linear))
        if self.experts:
            size, sparse = self.experts * hidden * self.expert_width, layers - self.dense_layers
            found.append(Tensor("experts", size, _GATED_MLP * sparse, experts, role="expert"))
            # upstream keeps the gate in float32
            found.append(Tensor("expert gate", hidden * self.experts, sparse, 4, sharded=False))
        return found + self._scales(q, kv)

    def _scales(self, q: int, kv: int) -> list[Tensor]:
        """The scales of quantized matrices: one for each output, sharded as the outputs are."""
        found, layers, dense = [], self.layers, self.dense_layers
        if self.linear_itemsize is not None:
            found += [
                Tensor("q scales", q, layers, 4),
                Tensor("k, v scales", kv, 2 * layers, 4),
                Tensor("o, down scales", self.hidden, layers + dense, 4, sharded=False),
                Tensor("gate, up scales", self.dense_width, 2 * dense, 4),
            ]
        if self.expert_itemsize is not None and self.experts:
            wide, narrow = self.experts * self.expert_width, self.experts * self.hidden
            sparse = layers - dense
            found += [
                Tensor("gate, up scales of experts", wide, 2 * sparse, 4, role="expert"),
                Tensor("down scales of experts", narrow, sparse, 4, sharded=False, role="expert"),
            ]
        return found

    def adapter_bytes(self, rank: int, targets: Collection[str], tp_size: int = 1) -> int:
        """The bytes on one chip of A and B of these layers, at this rank. B is divided over chips
        if the layer's outputs are. Otherwise A is."""
        q, hidden = self.heads * self.head_dim, self.hidden
        kv = self.kv_heads_on_chip(tp_size) * tp_size * self.head_dim
        sizes = {  # (replicated width, sharded width, number of layers)
            "q_proj": (hidden, q, self.layers),
            "k_proj": (hidden, kv, self.layers),
            "v_proj": (hidden, kv, self.layers),
            "o_proj": (hidden, q, self.layers),
            "gate_proj": (hidden, self.dense_width, self.dense_layers),
            "up_proj": (hidden, self.dense_width, self.dense_layers),
            "down_proj": (hidden, self.dense_width, self.dense_layers),
        }
        wanted = [sizes[name] for name in (sizes if "all" in targets else targets)]
        widths = ((whole + sharded // tp_size) * count for whole, sharded, count in wanted)
        return sum(widths) * rank * self.itemsize

    @property
    def _norms(self) -> int:
        return 4 if self.family == "gemma2" else 2

    @property
    def parameters(self) -> int:
        """The number of parameters, without scales."""
        scales = {each.name for each in self._scales(0, 0)}
        found = [each for each in self.tensors() if each.name not in scales]
        return sum(tensor.size * tensor.count for tensor in found)

    def weight_bytes(self, tp_size: int = 1) -> int:
        """The bytes of all weights on one chip."""
        return sum(tensor.on_chip(tp_size) for tensor in self.tensors(tp_size))

    def weight_bytes_read(self, tp_size: int, experts: float) -> float:
        """The bytes that a decode step reads on one chip, if each layer uses this many experts."""
        share = {"whole": 1.0, "rows": 0.0, "expert": experts / max(self.experts, 1)}
        return sum(t.on_chip(tp_size) * share[t.role] for t in self.tensors(tp_size))

    def kv_heads_on_chip(self, tp_size: int) -> int:
        return max(1, -(-self.kv_heads // tp_size))

    def kv_bytes_per_token(self, tp_size: int = 1, itemsize: int | None = None) -> int:
        """Bytes of one token's KV on one chip, over all layers."""
        width = -(-self.head_dim // _LANES) * _LANES
        heads = self.kv_heads_on_chip(tp_size)
        return 2 * self.layers * heads * width * (itemsize or self.itemsize)

    def kv_tokens_read(self, context: int) -> float:
        """The tokens of a request whose KV a step reads, averaged over the layers."""
        near = min(context, self.window) if self.window else context
        sliding = self.sliding_layers
        return (sliding * near + (self.layers - sliding) * context) / self.layers


def read_shape(model: str, server_args: Mapping[str, Any] | None = None) -> Shape:
    """The shape of a checkpoint: a directory, a config.json, or a hub id. Of a hub id only the
    configuration is fetched.

    Raises:
        InvalidConfig: There is no such configuration, the sizes of its family are not known, or its
            weights are quantized.
    """
    args = server_args or {}
    config = load(
        model, args.get("revision"), args.get("download_dir"), args.get("json_model_override_args")
    )
    for where, value in (
        ("quantization", args.get("quantization")),
        ("quantization_config", getattr(config, "quantization_config", None)),
    ):
        if value:
            raise InvalidConfig(
                f"{model}: {where}={shown(value)}: sizes of a quantized checkpoint are unknown"
            )
    shape = shape_of(config, args.get("dtype") or "auto", model, args.get("model_layer_nums"))
    if path := args.get("quantization_config_path"):
        linear, experts = itemsizes(path, shape.layers)
        return replace(shape, linear_itemsize=linear, expert_itemsize=experts)
    return shape


def shape_of(
    config: Any, dtype: str = "auto", name: str = "the model", most_layers: int | None = None
) -> Shape:
    """The shape of a model from its `transformers` configuration."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise InvalidConfig(
            f"{name}: sizes of model_type={family!r} are unknown; known are {', '.join(FAMILIES)}"
        )
    if dtype == "auto":
        own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        dtype = str(own or "float32").removeprefix("torch.")
    if dtype not in _ITEMSIZES:
        raise InvalidConfig(f"{name}: dtype={dtype!r}: expected one of {', '.join(_ITEMSIZES)}")
    _check_counts(config, name)
    layers = min(config.num_hidden_layers, most_layers or config.num_hidden_layers)
    experts = getattr(config, "num_experts", 0) or 0
    per_token = config.num_experts_per_tok if experts else 0
    expert_width = config.moe_intermediate_size if experts else 0
    dense = sum(i < layers for i in config.mlp_only_layers or ()) if experts else layers
    kinds = (getattr(config, "layer_types", None) or [])[:layers]
    width = config.intermediate_size
    return Shape(
        family=family,
        dtype=dtype,
        itemsize=_ITEMSIZES[dtype],
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        mlp_width=max(width if dense else 0, per_token * expert_width),
        vocab=config.vocab_size,
        context=_context(config),
        experts=experts,
        experts_per_token=per_token,
        sliding_layers=kinds.count("sliding_attention"),
        window=getattr(config, "sliding_window", None) or 0,
        tied=bool(config.tie_word_embeddings),
        attention_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        dense_layers=dense,
        expert_width=expert_width,
        dense_width=width,
    )


def _check_counts(config: Any, name: str) -> None:
    wanted = list(_COUNTS)
    # These may be missing. Then they are derived, or the model has no experts.
    wanted += [field for field in _MAY_BE_NONE if getattr(config, field, None)]
    wanted += _OF_EXPERTS if getattr(config, "num_experts", None) else ()
    for field in wanted:
        value: Any = getattr(config, field, None)
        if not is_int(value) or value < 1:
            raise InvalidConfig(
                f"{name}: {field}={shown(value)}: expected a whole number, 1 or more; correct "
                "config.json"
            )


def _context(config: Any) -> int:
    """The context in tokens, derived as in upstream (hf_transformers_utils.get_context_length)."""
    scaling = getattr(config, "rope_scaling", None) or {}
    stretched = not (
        "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    )
    factor = scaling.get("factor", 1) if stretched else 1
    return int(factor * config.max_position_embeddings)
