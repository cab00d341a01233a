"""Gemma2 and Qwen3-MoE in plain JAX, besides the families that the toy's forward pass knows. Also
those families with rotary embeddings that the toy's does not have.

Written from the models' papers and Hugging Face's configuration, to be read: no cache, no kernels,
one sequence at a time, every expert for every token. Parameters have their Hugging Face names. A
projection is stored (out, in).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.model_config.rotary import rotation
from enginepool.toy.model import forward as toy_forward
from scripts.train_toy.checkpoint import parameter_shapes as toy_shapes

_gelu = partial(jax.nn.gelu, approximate=True)

Config = Mapping[str, Any]
Leaf = Callable[[str], Any]

GEMMA2: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 100,
    "final_logit_softcapping": 5.0,
    # sglang-jax's native attention, which CPU uses, ignores a cap.
    "attn_logit_softcapping": None,
    "sliding_window": 4096,
}
QWEN3_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def forward(config: Config, params: Mapping[str, jax.Array], input_ids: Any) -> jax.Array:
    """Logits of the next token at every position, [B, T, V] float32."""
    scaled = config.get("rope_scaling") or config.get("rope_parameters")
    if config["model_type"] not in ("gemma2", "qwen3_moe") and not scaled:
        return toy_forward(config, params, input_ids)
    experts = config.get("num_experts", config.get("num_local_experts"))  # as transformers 5 has it
    config = {**config, "num_experts": experts}
    with jax.default_matmul_precision("highest"):
        return jax.vmap(partial(_logits, config, params))(jnp.asarray(input_ids))


def routing(config: Config, params: Mapping[str, jax.Array], input_ids: Any) -> jax.Array:
    """The experts that a Qwen3-MoE routes each token to, the best first: [B, T, layers, top_k]."""

    def one(ids: jax.Array) -> jax.Array:
        router = _Router()
        _logits(config, params, ids, router)
        return jnp.stack(router.chosen, axis=1)

    with jax.default_matmul_precision("highest"):
        return jax.vmap(one)(jnp.asarray(input_ids))


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by its Hugging Face name."""
    if config["model_type"] == "gemma2":
        shapes = toy_shapes(config)
        norm = (config["hidden_size"],)
        for index in range(config["num_hidden_layers"]):
            for name in ("pre", "post"):
                shapes[f"model.layers.{index}.{name}_feedforward_layernorm.weight"] = norm
        return shapes
    if config["model_type"] != "qwen3_moe":
        return toy_shapes(config)
    dense = toy_shapes({**config, "model_type": "qwen3"})
    shapes = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    for index in range(config["num_hidden_layers"]):
        if index in config["mlp_only_layers"]:
            own = f"model.layers.{index}.mlp."
            shapes |= {name: shape for name, shape in dense.items() if name.startswith(own)}
            continue
        at = f"model.layers.{index}.mlp."
        shapes[at + "gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for name in ("gate", "up"):
                shapes[f"{at}experts.{expert}.{name}_proj.weight"] = (width, hidden)
            shapes[f"{at}experts.{expert}.down_proj.weight"] = (hidden, width)
    return shapes


class _Router:
    """Chooses experts layer by layer, and records them."""

    def __init__(self) -> None:
        self.chosen: list[jax.Array] = []

    def __call__(self, share: jax.Array, count: int) -> jax.Array:
        self.chosen.append(jax.lax.top_k(share, count)[1])
        return self.chosen[-1]


def _logits(
    config: Config,
    params: Mapping[str, jax.Array],
    ids: jax.Array,
    router: _Router | None = None,
) -> jax.Array:
    router = router or _Router()
    gemma = config["model_type"] == "gemma2"
    norm = partial(_norm, epsilon=config["rms_norm_eps"], offset=1.0 if gemma else 0.0)
    embedding = params["model.embed_tokens.weight"]
    x = embedding[ids] * (np.sqrt(config["hidden_size"]) if gemma else 1.0)
    for index in range(config["num_hidden_layers"]):
        leaf = _layer(params, index)
        mixed = _attention(config, index, leaf, norm(x, leaf("input_layernorm.weight")))
        if gemma:
            x = x + norm(mixed, leaf("post_attention_layernorm.weight"))
            y = _gated(_gelu, leaf, norm(x, leaf("pre_feedforward_layernorm.weight")))
            x = x + norm(y, leaf("post_feedforward_layernorm.weight"))
        else:
            x = x + mixed
            y = norm(x, leaf("post_attention_layernorm.weight"))
            moe = config["model_type"] == "qwen3_moe" and index not in config["mlp_only_layers"]
            x = x + (_experts(config, leaf, y, router) if moe else _gated(jax.nn.silu, leaf, y))
    head = params.get("lm_head.weight", embedding)
    logits = norm(x, params["model.norm.weight"]) @ head.T
    return _capped(logits, config.get("final_logit_softcapping"))


def _layer(params: Mapping[str, jax.Array], index: int) -> Leaf:
    """A layer's parameters by the rest of their names; None where there is none."""
    return lambda name: params.get(f"model.layers.{index}.{name}")


def _attention(config: Config, index: int, leaf: Leaf, x: jax.Array) -> jax.Array:
    dim, length = config["head_dim"], len(x)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    q, k, v = (_projected(leaf, n, x).reshape(length, -1, dim) for n in "qkv")
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        q = _norm(q, leaf("self_attn.q_norm.weight"), config["rms_norm_eps"])
        k = _norm(k, leaf("self_attn.k_norm.weight"), config["rms_norm_eps"])
    q, k = _rotated(q, *rotation(config, index)), _rotated(k, *rotation(config, index))
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) * config.get("query_pre_attn_scalar", dim) ** -0.5
    scores = _capped(scores, config.get("attn_logit_softcapping"))
    back = np.arange(length)[:, None] - np.arange(length)
    seen = (back >= 0) & (back < _window(config, index))
    scores = jnp.where(seen, scores.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return _projected(leaf, "o", jnp.einsum("hqk,khd->qhd", weights, v).reshape(length, -1))


def _projected(leaf: Leaf, name: str, x: jax.Array) -> jax.Array:
    y = x @ leaf(f"self_attn.{name}_proj.weight").T
    bias = leaf(f"self_attn.{name}_proj.bias")
    return y if bias is None else y + bias


def _window(config: Config, index: int) -> float:
    """How many positions a layer looks back, including its own. Gemma2's first, third, … layers
    have a limit unless `layer_types` says otherwise."""
    if config["model_type"] != "gemma2":
        return np.inf
    kinds = config.get("layer_types") or ("sliding_attention", "full_attention")
    return config["sliding_window"] if kinds[index % len(kinds)] == "sliding_attention" else np.inf


def _gated(activation: Callable[..., jax.Array], leaf: Leaf, x: jax.Array) -> jax.Array:
    gate = activation(x @ leaf("mlp.gate_proj.weight").T)
    return (gate * (x @ leaf("mlp.up_proj.weight").T)) @ leaf("mlp.down_proj.weight").T


def _experts(config: Config, leaf: Leaf, x: jax.Array, router: _Router) -> jax.Array:
    """The best experts of each token, weighted by their share of the probability."""
    share = jax.nn.softmax((x @ leaf("mlp.gate.weight").T).astype(jnp.float32), axis=-1)
    chosen = router(share, config["num_experts_per_tok"])
    share = jnp.where(jax.nn.one_hot(chosen, share.shape[-1]).any(axis=1), share, 0.0)
    if config["norm_topk_prob"]:
        share = share / share.sum(axis=-1, keepdims=True)
    share = share.astype(x.dtype)

    def expert(index: int) -> jax.Array:
        its: Leaf = lambda name: leaf(name.replace("mlp.", f"mlp.experts.{index}."))  # noqa: E731
        return _gated(jax.nn.silu, its, x)

    each = jnp.stack([expert(index) for index in range(config["num_experts"])])
    return jnp.einsum("te,eth->th", share, each)


def _norm(x: jax.Array, weight: jax.Array, epsilon: float, offset: float = 0.0) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * (offset + weight)).astype(x.dtype)


def _rotated(x: jax.Array, frequencies: np.ndarray, scale: float) -> jax.Array:
    """[T, heads, dim] rotated by position, as complex numbers of two halves."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * frequencies
    y = (x[..., :half] + 1j * x[..., half:]) * (scale * jnp.exp(1j * angles))
    return jnp.concatenate([y.real, y.imag], axis=-1).astype(x.dtype)


def _capped(x: jax.Array, cap: float | None) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x
