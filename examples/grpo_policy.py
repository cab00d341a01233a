"""What grpo.py trains: all weights of the toy, or, with --lora, an adapter over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from enginepool import EnginePool, rl

type Params = Mapping[str, jax.Array]
Mode = Literal["drain", "in_place"]


class AllWeights:
    """The parameters are the weights, by Hugging Face's names.

    Attributes:
        pool_options: What a pool needs for it.
        call: What each call of the pool needs.
    """

    pool_options: Mapping[str, Any] = {}
    call: Mapping[str, Any] = {}
    learning_rate = 2e-4

    def start(self, weights: Params) -> Params:
        return weights

    def weights(self, params: Params, base: Params) -> Params:
        """The weights that the model computes with."""
        return params

    def give(self, pool: EnginePool, params: Params, version: int, mode: Mode = "drain") -> None:
        pool.update_weights(params, weight_version=version, mode=mode)

    def versions(self, batch: rl.RolloutBatch) -> np.ndarray:
        """The version of the parameters that each token came from, [N, T]."""
        return batch.weight_versions


class Adapter(AllWeights):
    """The parameters are A and B of each linear layer, by PEFT's names. The base stays.

    Args:
        name: The adapter's, in the pool.
    """

    learning_rate = 2e-3

    def __init__(self, rank: int, name: str = "policy", seed: int = 0) -> None:
        self._rank, self._name, self._seed = rank, name, seed
        self._config = {"r": rank, "lora_alpha": 2 * rank}
        self.pool_options = {
            "enable_lora": True,
            "max_lora_rank": rank,
            "lora_target_modules": ["all"],
        }
        self.call = {"lora_path": name}

    def start(self, weights: Params) -> Params:
        """A is random and B is zero, so that the model begins as the base."""
        rng, params = np.random.default_rng(self._seed), {}
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                a, b = _sides(name)
                size_out, size_in = weight.shape
                first = rng.normal(0, size_in**-0.5, (self._rank, size_in))
                params[a] = jax.device_put(first.astype(np.float32), weight.sharding)
                params[b] = jnp.zeros((size_out, self._rank), device=weight.sharding)
        return params

    def weights(self, params: Params, base: Params) -> Params:
        scale, merged = self._config["lora_alpha"] / self._rank, dict(base)
        for name, weight in base.items():
            a, b = _sides(name)
            if a in params:
                product = jnp.matmul(params[b], params[a], precision="highest")
                merged[name] = weight + scale * product
        return merged

    def give(self, pool: EnginePool, params: Params, version: int, mode: Mode = "drain") -> None:
        pool.load_lora_adapter(
            self._name, params, config_dict=self._config, weight_version=version, mode=mode
        )

    def versions(self, batch: rl.RolloutBatch) -> np.ndarray:
        assert batch.lora_versions is not None
        return batch.lora_versions


def _sides(name: str) -> tuple[str, str]:
    at = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    return f"{at}A.weight", f"{at}B.weight"
