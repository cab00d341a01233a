"""Tunix's `BaseRollout` over a pool."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import (  # pyright: ignore[reportMissingImports]
    TokenizerAdapter,
)
from tunix.generate.utils import next_power_of_2  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from enginepool import EnginePool, InvalidConfig, InvalidRequest, PoolFailed
from enginepool.tunix.parameters import (
    ParameterMapping,
    flat_params,
    mapping_config,
    merge_lora,
    split_lora,
)


@dataclass
class ReplayRolloutOutput(RolloutOutput):
    """Tunix's output, and what a trainer needs to repeat it. What was not asked for is empty.

    Attributes:
        sampling_masks: `meta_info["output_sampling_mask"]` of each output.
        sampling_logprobs: The log-probabilities of each output's tokens among the ids of its masks.
        routed_experts: `meta_info["routed_experts"]` of each prompt with its output.
    """

    sampling_masks: list[dict[str, Any]] = field(default_factory=list)
    sampling_logprobs: list[np.ndarray] = field(default_factory=list)
    routed_experts: list[str] = field(default_factory=list)


class EnginePoolRollout(BaseRollout):
    """A rollout engine of Tunix that runs on all engines of a pool. Thread-safe.

    The engines get the actor's parameters at the first call, because Tunix may restore a checkpoint
    after it has made this object, and at every `update_params`. Parameters do not pass through the
    host, except adapters that are synced by `lora_name`. An array in the engine's layout on its
    device is shared.

    Args:
        rollout_actor: The model that is trained.
        tokenizer: The tokenizer of the prompts. Outputs are decoded with the engines' own
            tokenizer.
        mesh: The engines run on its devices, unless `pool_args` has `devices`.
        rollout_config: `data_type`, `rollout_mapping_config` and, for LoRA,
            `rollout_sglang_jax_lora_scaling` hold for the whole run. Sampling parameters are taken
            from each call's config.
        pool: An existing pool. Its owner closes it.
        pool_args: The arguments of a pool to open instead, with `model`.
        lora_name: Sync the actor's LoRA parameters as an adapter of this name, and generate with
            it. The base is synced once, and when it is given again. The pool needs `enable_lora`,
            `max_lora_rank` and `lora_target_modules`. None: adapters are merged into the weights.
        return_sampling_mask, return_routed_experts: `generate` returns a `ReplayRolloutOutput`. For
            experts the pool needs `enable_return_routed_experts=True`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        pool: EnginePool | None = None,
        pool_args: Mapping[str, Any] | None = None,
        lora_name: str | None = None,
        return_sampling_mask: bool = False,
        return_routed_experts: bool = False,
    ) -> None:
        if (pool is None) == (pool_args is None):
            raise InvalidConfig("give EnginePoolRollout either pool= or pool_args=")
        is_adapter = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapter else TokenizerAdapter(tokenizer)
        self._actor = rollout_actor
        self._return_sampling_mask = return_sampling_mask
        self._lora_name = lora_name
        self._return_routed_experts = return_routed_experts
        self._lora_scaling = rollout_config.rollout_sglang_jax_lora_scaling
        # Done before the pool is opened. If it raised later, nobody could close the pool.
        config = mapping_config(rollout_actor, rollout_config.rollout_mapping_config)
        self.pool = pool or EnginePool(**_with_defaults(pool_args or {}, mesh, rollout_config))
        self.pool.open()
        self._mapping = ParameterMapping(config, _shapes(self.pool))
        self._calls = itertools.count()
        self._lock = threading.Lock()
        self._synced = False

    def generate(
        self, prompts: str | Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """One output for each prompt, its end token included.

        Log-probabilities are those of softmax(logits / temperature), one for each token. With a
        `seed`, the calls of a run differ from each other. The next run repeats them if its calls
        come in the same order.

        Args:
            prompts: One prompt or a list of prompts.
            kwargs: Further sampling parameters of the pool.

        Raises:
            InvalidRequest: There are no prompts.
            RequestsFailed: An output ended early. Tunix cannot represent that.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        if len(texts) == 0:
            raise InvalidRequest("prompts is empty: give at least one prompt")
        self._first_sync()
        ids = [self._tokenize(text) for text in texts]
        results = self.pool.generate_all(
            input_ids=ids,
            sampling_params=self._sampling_params(rollout_config) | kwargs,
            return_logprob=rollout_config.return_logprobs,
            lora_path=self._lora_name,
            return_sampling_mask=self._return_sampling_mask,
            return_routed_experts=self._return_routed_experts,
            raise_on_error=True,
        )
        # A constant width, so that the trainer's programs are compiled once.
        width, longest = rollout_config.max_prompt_length, max(map(len, ids))
        width = next_power_of_2(longest) if longest > width else width
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        logprobs = None
        if rollout_config.return_logprobs:
            entries = [result["meta_info"]["output_token_logprobs"] for result in results]
            logprobs = [np.array([value for value, *_ in e], np.float32) for e in entries]
        fields: dict[str, Any] = {
            "text": [result["text"] for result in results],
            "logits": None,
            "tokens": [np.array(result["output_ids"], np.int32) for result in results],
            "left_padded_prompt_tokens": padded,
            "logprobs": logprobs,
        }
        metas = [result["meta_info"] for result in results]
        if self._return_sampling_mask:
            values = [meta["output_token_sampling_logprobs"] for meta in metas]
            fields["sampling_masks"] = [meta["output_sampling_mask"] for meta in metas]
            fields["sampling_logprobs"] = [np.array(one, np.float32) for one in values]
        if self._return_routed_experts:
            fields["routed_experts"] = [meta["routed_experts"] for meta in metas]
        recorded = self._return_sampling_mask or self._return_routed_experts
        return ReplayRolloutOutput(**fields) if recorded else RolloutOutput(**fields)

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """The log-probability of each token of a completion, computed by the engines: [B, T]
        float32, 0 in the padding. It is that of softmax(logits), at temperature 1, as in Tunix's
        own rollouts.
        """
        self._first_sync()
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        values = np.zeros(completions.shape, np.float32)
        lengths = [_end(row, self.pad_id(), self.eos_id()) for row in completions]
        rows = [row for row, length in enumerate(lengths) if length]
        results: Any = self.pool.score(
            input_ids=[
                prompts[row][_begin(prompts[row], self.pad_id()) :].tolist() for row in rows
            ],
            continuation_ids=[completions[row][: lengths[row]].tolist() for row in rows],
            lora_path=self._lora_name,
            raise_on_error=True,
        )
        for row, result in zip(rows, results, strict=True):
            values[row, : lengths[row]] = result["logprobs"]
        return jnp.asarray(values)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give every engine these parameters. Parameters that are left out come from the actor.

        Adapters (LoRA) are merged into the parameters that they adapt, or synced alone.
        """
        del filter_types  # Tunix has filtered `params` by them
        with self._lock:
            self._update(flat_params(params))

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """None. It tells Tunix that weights have to be synced."""
        return None

    def _first_sync(self) -> None:
        with self._lock:
            if not self._synced:
                self._update({})

    def _update(self, given: Mapping[str, jax.Array]) -> None:
        params = flat_params(nnx.state(self._actor, nnx.Param)) | dict(given)
        if self._lora_name is None:
            merged = merge_lora(params, self._lora_scaling)
            self.pool.update_weights(self._mapping.source(merged))
        else:
            base, adapters = split_lora(params, self._lora_scaling)
            if not self._synced or any(name in base for name in given):
                self.pool.update_weights(self._mapping.source(base))
            self._load(self._lora_name, adapters)
        self._synced = True

    def _load(self, name: str, adapters: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
        if not adapters:
            raise InvalidConfig(f"lora_name={name!r}: the actor has no LoRA parameters")
        assert self._lora_scaling is not None
        rank = max(a.shape[-1] for a, _ in adapters.values())
        config = {"r": rank, "lora_alpha": self._lora_scaling * rank}
        # The pool keeps adapters on the host, too. On CPU, Tunix forbids copies in its syncs.
        with jax.transfer_guard("allow"):
            self.pool.load_lora_adapter(name, self._mapping.adapter(adapters), config_dict=config)

    def _tokenize(self, text: str) -> list[int]:
        """Encode as Tunix's own samplers do."""
        first = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids(
            ([first] if first else []) + list(self._tokenizer.encode(text))
        )

    def _sampling_params(self, config: RolloutConfig) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "stop_token_ids": config.eos_tokens or [self.eos_id()],
        }
        if config.top_p is not None:
            params["top_p"] = config.top_p
        if config.top_k is not None:
            params["top_k"] = config.top_k
        if config.seed is not None:
            # An agent asks for each sample in its own call. With one seed they would be equal.
            params["sampling_seed"] = _seed(config.seed, next(self._calls))
        return params


def _with_defaults(
    pool_args: Mapping[str, Any], mesh: jax.sharding.Mesh, config: RolloutConfig
) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    if not mesh.empty:
        defaults["devices"] = list(mesh.devices.flat)
    if config.data_type is not None:
        defaults["dtype"] = jnp.dtype(config.data_type).name
    return defaults | dict(pool_args)


def _shapes(pool: EnginePool) -> dict[str, tuple[int, ...]]:
    """The shapes of an engine's parameters, by path. All engines have the same."""
    # An engine that is being rebuilt has no scheduler.
    schedulers: list[Any] = [engine.scheduler_info.get("scheduler") for engine in pool.engines]
    scheduler = next(filter(None, schedulers), None)
    if scheduler is None:
        raise PoolFailed("all engines of the pool are being rebuilt: make the rollout again later")
    params = flat_params(nnx.state(scheduler.tp_worker.worker.model_runner.model))
    return {path: value.shape for path, value in params.items()}


def _seed(seed: Any, call: int) -> int:
    """A seed of 31 bits from the run's seed (a number or a JAX key) and the call's number."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = [int(word) & 0xFFFFFFFF for word in np.asarray(seed).ravel()]
    return int(np.random.SeedSequence([*words, call]).generate_state(1)[0] >> 1)


def _begin(ids: np.ndarray, pad_id: int) -> int:
    """Where the padding on the left ends."""
    return int(np.argmax(ids != pad_id))


def _end(ids: np.ndarray, pad_id: int, eos_id: int) -> int:
    """Where the padding on the right begins. If it is of end tokens, the first one counts."""
    real = np.flatnonzero(ids != pad_id)
    end = int(real[-1]) + 1 if len(real) else 0
    return min(end + (pad_id == eos_id), len(ids))
