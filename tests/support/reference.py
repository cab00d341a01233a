"""The answers that an engine must give, by a plain JAX forward pass, and models to test with.

`reference_greedy` decodes without an engine. `make_random_model` writes tiny checkpoints of the
families that an engine loads.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from enginepool.toy.files import read_checkpoint
from scripts.train_toy.checkpoint import CONFIG, write_checkpoint
from tests.support.families import GEMMA2, QWEN3_MOE, forward, parameter_shapes

PAD_TO = 64
# A Qwen3 for tests that need several layers or heads, or engines of two devices.
LARGER = {"num_layers": 2, "num_heads": 2}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


class Greedy(NamedTuple):
    """Greedy decoding of one prompt.

    Attributes:
        ids: the tokens chosen; an end token does not stop the decoding.
        logprobs: natural log-probability of each chosen token, at temperature 1.
        gaps: by how much each chosen token's logit exceeds the second best.  Below what
            an engine's rounding may amount to, either token is right.
    """

    ids: list[int]
    logprobs: list[float]
    gaps: list[float]


def reference_greedy(model_dir: str | Path, prompt_ids: Sequence[int], num_tokens: int) -> Greedy:
    """Decode one prompt with the weights of a checkpoint directory, in float32."""
    return reference_greedy_batch(model_dir, [prompt_ids], num_tokens)[0]


def reference_greedy_batch(
    model_dir: str | Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Greedy]:
    """Decode several prompts at once; their lengths may differ."""
    config_json, params = _load(Path(model_dir).resolve(), _stamp(Path(model_dir)))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    # Lengths are padded to blocks, so that there are few shapes and few compilations.
    blocks = -(-int(lengths.max() + num_tokens) // PAD_TO)
    ids = np.zeros((len(prompts), blocks * PAD_TO), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    rows = np.arange(len(prompts))
    steps = []
    for step in range(num_tokens):
        chosen, logprob, gap = map(np.asarray, _next(config_json, params, ids, lengths + step - 1))
        ids[rows, lengths + step] = chosen
        steps.append((chosen, logprob, gap))
    return [
        Greedy(
            [int(chosen[row]) for chosen, _, _ in steps],
            [float(logprob[row]) for _, logprob, _ in steps],
            [float(gap[row]) for _, _, gap in steps],
        )
        for row in rows
    ]


def make_random_model(
    model_dir: str | Path,
    family: str,
    seed: int = 0,
    *,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    std: float = 0.15,
    tied: bool | None = None,
    dtype: Any = np.float32,
) -> Path:
    """Write a tiny checkpoint of random weights, with the toy's tokenizer.

    Args:
        family: "qwen2" (biases), "qwen3" (q and k norms), "llama", "gemma2" or "qwen3_moe".
        num_layers: by default 2. Qwen3, which most tests run, has 1 layer of 1 head: nearly all of
            a step is sglang-jax's native attention, and that takes as long for each. See `LARGER`.
        num_heads: by default 4, and two queries share a key.
        num_kv_heads: by default 2, or 1 of 1; at least 2 for "qwen2" and "llama": with 1,
            sglang-jax's native attention refuses the differing shardings of keys and values.
        tied: whether the output matrix is the embedding; by default Llama's is not.
        std: of every matrix; large enough to keep the best two logits well apart.
        dtype: the weights are rounded to it and stored in it.

    Returns:
        `model_dir` as a path.
    """
    num_layers = num_layers or (1 if family == "qwen3" else 2)
    num_heads = num_heads or (1 if family == "qwen3" else 4)
    num_kv_heads = num_kv_heads or min(num_heads, 2)
    config = random_config(family, num_layers, num_heads, num_kv_heads, dtype, tied)
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        # Norms and biases are random, too, so that tests notice if they are mixed up or left out.
        # For Gemma one is added to the weight of a norm.
        centre = 1.0 if name.endswith("norm.weight") and family != "gemma2" else 0.0
        params[name] = rng.normal(centre, std, shape).astype(np.float32)
    write_checkpoint(Path(model_dir), params, config, dtype)
    return Path(model_dir)


def random_config(
    family: str,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: Any,
    tied: bool | None = None,
) -> dict[str, Any]:
    """The config.json of a random model."""
    config = dict(CONFIG)
    if family in ("qwen2", "llama"):
        del config["attention_bias"]  # Qwen2 has no such key and Llama's default is none
    config |= {"gemma2": GEMMA2, "qwen3_moe": QWEN3_MOE}.get(family, {})
    return config | {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 256,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": family != "llama" if tied is None else tied,
        "torch_dtype": np.dtype(dtype).name,
    }


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, for `make_random_model`."""
    return np.dtype(ml_dtypes.bfloat16)


def _next(
    config_json: str, params: dict[str, jax.Array], ids: np.ndarray, last: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best next token after position `last` of each row, its log-probability and its lead."""
    return _compiled(config_json)(params, ids, last)


@lru_cache(maxsize=16)
def _compiled(config_json: str) -> Any:
    config = json.loads(config_json)

    def choose(params: dict[str, jax.Array], ids: jax.Array, last: jax.Array) -> Any:
        logits = forward(config, params, ids)[jnp.arange(len(ids)), last]
        best, tokens = jax.lax.top_k(logits, 2)
        logprob = best[:, 0] - jax.nn.logsumexp(logits, axis=-1)
        return tokens[:, 0], logprob, best[:, 0] - best[:, 1]

    return jax.jit(choose)


def _stamp(model_dir: Path) -> int:
    """Changes when the weights' file does, so that a rewritten checkpoint is read again."""
    return (model_dir / "model.safetensors").stat().st_mtime_ns


@lru_cache(maxsize=16)
def _load(model_dir: Path, stamp: int) -> tuple[str, dict[str, jax.Array]]:
    config, params = read_checkpoint(model_dir)
    as_float32 = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return json.dumps(config, sort_keys=True), as_float32
