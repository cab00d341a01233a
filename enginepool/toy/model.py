"""A decoder of the Qwen3, Qwen2 and Llama families, in plain JAX and in float32.

The toy was trained with it, and tests compare engines with it. So it is written for reading and
shares no code with sglang-jax or transformers: no KV cache, no sharding, no kernels. Parameters
have their Hugging Face names. A projection is stored (out, in), as in a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Config = Mapping[str, Any]
Params = Mapping[str, jax.Array]


def forward(
    config: Config,
    params: Mapping[str, ArrayLike],
    input_ids: ArrayLike,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Logits of the next token at every position.

    Args:
        config: what the checkpoint's config.json holds. Only the default rotary embedding works.
        params: arrays of any float dtype by Hugging Face name. The computation is in float32.
        input_ids: [B, T] int32.  Right padding needs no mask, since attention is causal.
        mask: [B, T], true at the tokens that may be attended to; None means all of them.

    Returns:
        [B, T, V] float32.
    """
    if config.get("rope_scaling"):
        raise NotImplementedError("rope_scaling is not part of this reference")
    # By default accelerators compute float32 products in a shorter format.
    with jax.default_matmul_precision("highest"):
        arrays = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
        input_ids = jnp.asarray(input_ids)
        length = input_ids.shape[1]
        visible = jnp.tril(jnp.ones((length, length), bool))[None]
        if mask is not None:
            visible = visible & jnp.asarray(mask, bool)[:, None, :]
        rotation = _rotation(length, head_dim(config), config.get("rope_theta", 10000.0))
        epsilon = config["rms_norm_eps"]
        hidden = arrays["model.embed_tokens.weight"][input_ids]
        for index in range(config["num_hidden_layers"]):
            layer = _under(arrays, f"model.layers.{index}.")
            normed = _rms_norm(hidden, layer["input_layernorm.weight"], epsilon)
            hidden = hidden + _attention(config, layer, normed, rotation, visible)
            normed = _rms_norm(hidden, layer["post_attention_layernorm.weight"], epsilon)
            hidden = hidden + _mlp(layer, normed)
        hidden = _rms_norm(hidden, arrays["model.norm.weight"], epsilon)
        tied = config.get("tie_word_embeddings", False)
        head = arrays["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return hidden @ head.T


def head_dim(config: Config) -> int:
    """The width of one attention head. By default the hidden width divided by the heads."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _attention(
    config: Config,
    layer: Params,
    hidden: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    visible: jax.Array,
) -> jax.Array:
    """Grouped-query attention over [B, T, hidden]; `visible` is [1 or B, query, key]."""
    dim, kv_heads = head_dim(config), config["num_key_value_heads"]
    groups = config["num_attention_heads"] // kv_heads
    q = _split(_project(layer, "q", hidden), dim)
    k = _split(_project(layer, "k", hidden), dim)
    v = _split(_project(layer, "v", hidden), dim)
    if config["model_type"] == "qwen3":
        q = _rms_norm(q, layer["self_attn.q_norm.weight"], config["rms_norm_eps"])
        k = _rms_norm(k, layer["self_attn.k_norm.weight"], config["rms_norm_eps"])
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    # Consecutive query heads share a key-value head.
    q = q.reshape(*q.shape[:2], kv_heads, groups, dim)
    scores = jnp.einsum("bqngd,bknd->bngqk", q, k) * dim**-0.5
    # A finite number: with -inf, a row that may see no key would turn into NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bngqk,bknd->bqngd", weights, v)
    return mixed.reshape(*hidden.shape[:2], -1) @ layer["self_attn.o_proj.weight"].T


def _mlp(layer: Params, hidden: jax.Array) -> jax.Array:
    gate = hidden @ layer["mlp.gate_proj.weight"].T
    up = hidden @ layer["mlp.up_proj.weight"].T
    return (jax.nn.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def _project(layer: Params, name: str, hidden: jax.Array) -> jax.Array:
    projected = hidden @ layer[f"self_attn.{name}_proj.weight"].T
    bias = layer.get(f"self_attn.{name}_proj.bias")
    return projected if bias is None else projected + bias


def _split(projected: jax.Array, dim: int) -> jax.Array:
    """[B, T, heads * dim] to [B, T, heads, dim]."""
    return projected.reshape(*projected.shape[:2], -1, dim)


def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * weight


def _rotation(length: int, dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, [T, 1, dim // 2] each."""
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate [B, T, heads, dim] by position. An entry's partner is half a head away from it."""
    cosine, sine = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def _under(params: Params, prefix: str) -> dict[str, jax.Array]:
    """The parameters below a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in params.items()
        if name.startswith(prefix)
    }
