"""The patches of rotary embeddings, on upstream's own attention layers. Only frequencies are
computed, and one vector is rotated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import patches
from enginepool.model_config.rotary import rotation
from patches import llama3_rotary, rotary_precision, rotary_scaling
from patches._lookup import module

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ATTENTIONS = {
    "llama": "LlamaAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "QWen3Attention",
    "qwen3_moe": "QWen3MoeAttention",
}


def rotated_frequencies(embedding: Any) -> tuple[np.ndarray, float]:
    """The frequencies that the forward uses, and its scale, read from the rotated vector (1, 0)."""
    half = embedding.head_size // 2
    head = np.zeros((2, embedding.head_size), np.float32)
    head[:, :half] = 1
    cosine, sine = np.split(np.asarray(embedding(jnp.arange(2), head, head)[0]), 2, axis=-1)
    return np.arctan2(sine[1], cosine[1]), float(np.hypot(cosine[0], sine[0]).mean())


def embedding_of(family: str, scaling: dict[str, Any]) -> Any:
    attention = getattr(module(f"sgl_jax.srt.models.{family}"), ATTENTIONS[family])
    mesh = Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1),
        ("data", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    made = []

    def make() -> Any:
        made.append(
            attention(
                hidden_size=256, num_heads=2, num_kv_heads=2, head_dim=128, mesh=mesh,
                max_position_embeddings=512, rope_theta=10000.0, rope_scaling=scaling,
                dtype=jnp.float32,
            )
        )  # fmt: skip
        return made[0]

    with jax.set_mesh(mesh):
        nnx.eval_shape(make)
    return made[0].rotary_emb


def expected(scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    return rotation({
        "model_type": "llama", "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": scaling,
        "max_position_embeddings": 512,
    })  # fmt: skip


def same(found: tuple[np.ndarray, float], scaling: dict[str, Any]) -> bool:
    frequencies, scale = expected(scaling)
    return np.allclose(found[0], frequencies, atol=1e-6) and np.isclose(found[1], scale)


@pytest.fixture
def patched() -> Any:
    applied = patches.apply()
    yield
    patches.revert(applied)


def test_llama3_is_not_applied() -> None:
    assert llama3_rotary.PATCH.is_needed()
    assert not same(rotated_frequencies(embedding_of("llama", LLAMA3)), LLAMA3)


def test_scaling_is_dropped() -> None:
    """Whether Qwen2 drops it depends on upstream's version. Both Qwen3 models drop it in both
    versions."""
    assert rotary_scaling.PATCH.is_needed()
    for family in ("qwen3", "qwen3_moe"):
        assert not same(rotated_frequencies(embedding_of(family, YARN)), YARN)
    with_factor = YARN | {"attention_factor": 0.5}
    assert not same(rotated_frequencies(embedding_of("qwen2", with_factor)), with_factor)


@pytest.mark.parametrize("family", ATTENTIONS)
@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 0.5},
        YARN | {"attention_factor": None, "beta_fast": None},
        YARN | {"mscale": 0.5},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    ],
    ids=["llama3", "yarn", "factor", "none", "mscale", "two mscales"],
)
@pytest.mark.usefixtures("patched")
def test_scaling_is_computed(family: str, scaling: dict[str, Any]) -> None:
    assert same(rotated_frequencies(embedding_of(family, dict(scaling))), scaling)


@pytest.mark.usefixtures("patched")
def test_upstreams_cache_keeps_its_own() -> None:
    """Embeddings that were made before the patches are not used, and those made with the patches
    do not stay."""
    patches.revert()
    embedding_of("llama", LLAMA3)
    cached = dict(module("sgl_jax.srt.layers.embeddings")._ROPE_DICT)
    patches.apply()
    assert same(rotated_frequencies(embedding_of("llama", LLAMA3)), LLAMA3)
    after = module("sgl_jax.srt.layers.embeddings")._ROPE_DICT
    scaled = [key for key in after if key not in cached and "llama3" in repr(key)]
    assert scaled == []


def test_frequencies_in_bfloat16() -> None:
    """At a far position the angle is right up to bfloat16's rounding of its cosine. Without the
    patch, where upstream needs it, the angle is arbitrary."""
    rotary = module("sgl_jax.srt.layers.embeddings").RotaryEmbedding

    def error() -> float:
        embedding = rotary(128, 128, 4096, 10000.0, True, jnp.bfloat16)
        head = np.zeros((1, 128), np.float32)
        head[:, :64] = 1
        cosine = np.asarray(embedding(np.array([3001]), head, head)[0])[0, :64]
        exact = np.cos(3001 * 10000.0 ** (-np.arange(0, 128, 2) / 128))
        return float(np.abs(cosine - exact).max())

    assert (error() > 0.1) == rotary_precision.PATCH.is_needed()
    applied = patches.apply([rotary_precision.PATCH])
    try:
        assert error() < 0.005
    finally:
        patches.revert(applied)
