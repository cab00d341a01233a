"""A pool as a rollout backend of MLLM-JAX, in whose trainer it stands beside the built-in sampler.

An adapter: it uses what every user of the package can, and nothing of MLLM-JAX, whose protocol asks
for methods and not for a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginepool import EnginePool


@dataclass(frozen=True)
class RolloutResult:
    """What MLLM-JAX calls a rollout's result; one row a prompt, in order.

    Attributes:
        chat_prompts: The prompts after the chat template.
        answers: The outputs' texts, without special tokens.
        batch: int32 arrays [prompts, width]: `input_ids` has prompt and output, padded on the
            right; `attention_mask` is 1 on both; `labels` is 1 on the output, its end token
            included.
    """

    chat_prompts: list[str]
    answers: list[str]
    batch: dict[str, np.ndarray]


class EnginePoolRolloutBackend:
    """MLLM-JAX's `RolloutBackend`, with all of its optional hooks.

    Args:
        pool: Opened by `initialize` or the first rollout; `shutdown` closes it.
        sampling_params: Of every output; `max_new_tokens` is the rollout's. By default everything
            is sampled at temperature 1.
        copy: Engines get weights of their own, so that a trainer may donate its own without
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
        """Give every engine the trainer's weights: its parameter tree as it is."""
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
        """One output for every prompt, over all engines; a group is its prompt, repeated.

        Args:
            params: Go to the engines first, unless they are those of the last `sync_weights`;
                None leaves the engines as they are.
            global_length: Rows have room for a prompt of this length, or of the longest if that is
                longer, and for `max_length_sample` tokens after it.
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
        """Forget the cached prefixes."""
        self.pool.flush_cache()

    def release_weights(self) -> None:
        """The engines let go of the trainer's arrays, which its step may donate now; the next
        rollout or `sync_weights` brings new ones."""
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
