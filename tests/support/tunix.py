"""Tunix's own models, clusters and forward pass, for tests of the rollout over a pool.

Imports Tunix: import it only if that is installed.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from enginepool.toy.files import PAD_ID
from enginepool.tunix import EnginePoolRollout
from tests.support.reference import LARGER, make_random_model

LOADERS: dict[str, tuple[Any, Any]] = {
    "qwen2": (qwen2, qwen2_params),
    "qwen3": (qwen3, qwen3_params),
    "llama": (llama3, llama3_params),
}
ROWS = 8  # rows of Tunix's forward pass: one shape, one compilation


def make_checkpoint(directory: Path, family: str, seed: int) -> Path:
    """Random weights in the toy's shape, with the rotary embedding of Tunix's Qwen3."""
    make_random_model(directory, family, seed, **LARGER if family == "qwen3" else {})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"rope_theta": 1_000_000}
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def load(directory: Path, family: str, mesh: Mesh) -> nnx.Module:
    """Tunix's model, with a checkpoint's weights."""
    tied = "weight_tying" if family == "llama" else "use_tied_embedding"
    model, params = LOADERS[family]
    config = model.ModelConfig(**dimensions(directory, tied))
    return params.create_model_from_safe_tensors(str(directory), config, mesh)


def dimensions(directory: Path, tied: str) -> dict[str, Any]:
    """A checkpoint's dimensions by the names of Tunix's `ModelConfig`. `tied` is the family's
    own name."""
    given = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return {
        "num_layers": given["num_hidden_layers"],
        "vocab_size": given["vocab_size"],
        "embed_dim": given["hidden_size"],
        "hidden_dim": given["intermediate_size"],
        "num_heads": given["num_attention_heads"],
        "head_dim": given["head_dim"],
        "num_kv_heads": given["num_key_value_heads"],
        "norm_eps": given["rms_norm_eps"],
        "rope_theta": given["rope_theta"],
        tied: given["tie_word_embeddings"],
    }


def mesh_of(fsdp: int, tp: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


def tokenizer_of(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(directory))


def make_cluster(
    actor: nnx.Module,
    mesh: Mesh,
    tokenizer: Any,
    rollout_engine: Any,
    rollout_config: RolloutConfig,
    *,
    steps: int,
    reference: nnx.Module | None = None,
    **training: Any,
) -> RLCluster:
    return RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=rollout_engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3),
                eval_every_n_steps=1000,
                max_steps=steps,
                **training,
            ),
            rollout_config=rollout_config,
        ),
    )


def many_letters(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs within every group."""
    return [sum(map(str.isascii, text)) / 10 for text in completions]


class Model:
    """A copy of a model as it is now, which later training does not change."""

    def __init__(self, model: nnx.Module) -> None:
        self._graphdef, state = nnx.split(model)
        self._state = jax.tree.map(lambda leaf: leaf, state)

    def logps(
        self, prompts: np.ndarray, completions: np.ndarray, temperature: float = 1.0
    ) -> np.ndarray:
        """The log-probability of each token of the completions, by Tunix's own forward pass."""
        found = []
        for start in range(0, len(prompts), ROWS):
            blocks = []
            for ids in (prompts, completions):
                block = np.full((ROWS, ids.shape[1]), PAD_ID, np.int32)
                block[: len(ids[start : start + ROWS])] = ids[start : start + ROWS]
                blocks.append(jnp.asarray(block))
            found.append(
                common.compute_per_token_logps(
                    self._graphdef,
                    self._state,
                    *blocks,
                    pad_id=PAD_ID,
                    eos_id=-1,
                    temperature=temperature,
                )
            )
        return np.concatenate(found)[: len(prompts)]


class Watched(EnginePoolRollout):
    """A rollout that records its calls and results, with the model that it should use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.models: list[Model] = []
        self.outputs: list[tuple[Model, RolloutOutput, float]] = []
        self.scores: list[tuple[Model, tuple[np.ndarray, np.ndarray], np.ndarray]] = []
        self.most_at_once = self._at_once = 0
        self._counting = threading.Lock()

    def _update(self, given: Mapping[str, jax.Array]) -> None:
        super()._update(given)
        self.models.append(Model(self._actor))

    def generate(
        self, prompts: str | Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        with self._counting:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        output = super().generate(prompts, rollout_config, **kwargs)
        with self._counting:
            self._at_once -= 1
        self.outputs.append((self.models[-1], output, rollout_config.temperature))
        return output

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        values = super().get_per_token_logps(prompt_tokens, completion_tokens)
        asked = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        self.scores.append((self.models[-1], asked, np.asarray(values)))
        return values


def before_padding(ids: np.ndarray) -> np.ndarray:
    """The ids of each row before its first padding id. Tunix also treats a sampled padding id as
    padding, which random weights sample now and then, and ignores later ids."""
    return np.cumsum(ids == PAD_ID, axis=-1) == 0


def assert_outputs(rollout: Watched) -> int:
    """Every log-probability is Tunix's own. Returns how many were compared."""
    compared = 0
    for model, output, temperature in rollout.outputs:
        width = 64
        completions = np.full((len(output.tokens), width), PAD_ID, np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        expected = model.logps(output.left_padded_prompt_tokens, completions, temperature)
        assert output.logprobs is not None
        for row, tokens, values in zip(expected, output.tokens, output.logprobs, strict=True):
            assert len(values) == len(tokens)
            seen = before_padding(np.array(tokens))
            assert np.abs(row[: len(tokens)] - values)[seen].max(initial=0) < 1e-4
            compared += int(seen.sum())
    return compared


def assert_scores(rollout: Watched) -> int:
    """As `assert_outputs`, for scores of the engines. The padding has zeros."""
    compared = 0
    for model, (prompts, completions), values in rollout.scores:
        expected = model.logps(prompts, completions)
        seen = before_padding(completions)
        assert np.abs(expected - values)[seen].max() < 1e-4
        ended = np.cumsum((completions != PAD_ID)[:, ::-1], axis=1)[:, ::-1] == 0
        assert (values[ended] == 0).all()
        compared += int(seen.sum())
    return compared


def hugging_face(actor: nnx.Module) -> dict[str, np.ndarray]:
    """The model's parameters with Hugging Face's names."""
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(actor, nnx.Param)):
        *where, module, last = map(str, path)
        value, prefix = np.asarray(leaf.get_value()), ".".join(["model", *where])
        if module == "embedder":
            tensors["model.embed_tokens.weight"] = value
        elif module == "lm_head":
            tensors["lm_head.weight"] = value.T
        elif last.endswith("_bias"):
            tensors[f"{prefix}.self_attn.{last[0]}_proj.bias"] = value
        elif module == "o_proj":
            tensors[f"{prefix}.o_proj.weight"] = value.reshape(-1, value.shape[-1]).T
        elif value.ndim > 1:
            tensors[f"{prefix}.{module}.weight"] = value.reshape(len(value), -1).T
        else:
            name = "norm" if module == "final_norm" else module
            tensors[f"{prefix}.{name}.weight"] = value
    return {name.replace(".attn.", ".self_attn."): value for name, value in tensors.items()}
