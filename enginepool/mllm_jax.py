"""A pool as a rollout backend of MLLM-JAX, in place of its built-in sampler.

It is an adapter and uses the public API only. It imports nothing of MLLM-JAX, whose protocol asks
for methods and not for a base class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginepool import EnginePool


@dataclass(frozen=True)
class RolloutResult:
    """The result of a rollout in MLLM-JAX. One row per prompt, in order.

    Attributes:
        chat_prompts: The prompts after the chat template.
        answers: The texts of the outputs, without special tokens.
        batch: int32 arrays of shape [prompts, width]. `input_ids` has prompt and output, padded
            on the right. `attention_mask` is 1 on both. `labels` is 1 on the output, its end
            token included.
    """

    chat_prompts: list[str]
    answers: list[str]
    batch: dict[str, np.ndarray]


class EnginePoolRolloutBackend:
    """MLLM-JAX's `RolloutBackend`, with all of its optional hooks.

    Args:
        pool: `initialize` or the first rollout opens it. `shutdown` closes it.
        sampling_params: The parameters of every output, without `max_new_tokens`, which each
            rollout sets. Default: temperature 1.
        copy: Engines copy the weights, so the trainer may donate its arrays without
            `release_weights`.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        copy: bool = False,
    ) -> None:
        self.pool = pool
        self._sampling_params = dict(sampling_params or {"temperature": 1.0})
        self._copy = copy
        self._synced: Any = None

    def initialize(self) -> None:
        """Build and warm up the engines."""
        self.pool.open()

    def sync_weights(self, params: Any) -> None:
        """Give every engine the trainer's weights, as its parameter tree."""
        self.pool.update_weights(params, copy=self._copy)
        self._synced = params

    def rollout(
        self,
        *,
        prompts: Sequence[str],
        params: Any,
        system_prompt: str,
        global_length: int,
        max_length_sample: int,
    ) -> RolloutResult:
        """Generate one output for each prompt, on all engines. Repeat a prompt for a group.

        Args:
            params: New weights for the engines. Skipped if they are those of the last
                `sync_weights`. None: no new weights.
            global_length: All rows have `global_length` + `max_length_sample` columns. If a prompt
                is longer than `global_length`, its length counts instead.
        """
        if params is not None and params is not self._synced:
            self.sync_weights(params)
        tokenizer = self.pool.front_end().tokenizer
        chat_prompts = [_chat(tokenizer, system_prompt, prompt) for prompt in prompts]
        ids = tokenizer(chat_prompts)["input_ids"] if chat_prompts else []
        results = self.pool.generate_all(
            input_ids=ids,
            sampling_params={**self._sampling_params, "max_new_tokens": max_length_sample, "n": 1},
            raise_on_error=True,
        )
        width = max([global_length, *map(len, ids)]) + max_length_sample
        padding = tokenizer.pad_token_id
        outputs = [result["output_ids"] for result in results]
        batch = _batch(ids, outputs, width, tokenizer.eos_token_id if padding is None else padding)
        return RolloutResult(chat_prompts, [result["text"] for result in results], batch)

    def flush_cache(self) -> None:
        """Empty the prefix caches."""
        self.pool.flush_cache()

    def release_weights(self) -> None:
        """Release the trainer's arrays, so that its step may donate them.

        The next rollout or `sync_weights` brings new weights.
        """
        self.pool.release_weights()
        self._synced = None

    def shutdown(self) -> None:
        """Close the pool."""
        self.pool.close()
        self._synced = None


def _chat(tokenizer: Any, system_prompt: str, prompt: str) -> str:
    messages = [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": prompt},
    ]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _batch(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], width: int, padding: int
) -> dict[str, np.ndarray]:
    shape = len(prompts), width
    batch = {
        "input_ids": np.full(shape, padding, np.int32),
        "attention_mask": np.zeros(shape, np.int32),
        "labels": np.zeros(shape, np.int32),
    }
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        begin, end = len(prompt), len(prompt) + len(output)
        batch["input_ids"][row, :end] = [*prompt, *output]
        batch["attention_mask"][row, :end] = 1
        batch["labels"][row, begin:end] = 1
    return batch
