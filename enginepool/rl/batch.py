"""Turns results into arrays of fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest
from enginepool.rl.kept import KeptIds, width

_INT32 = np.iinfo(np.int32)
# [first token, end, version]: output tokens that came from one version.
type _Span = tuple[int, int, int | str]


class RolloutBatch(NamedTuple):
    """Results as arrays: N of them, in order, with P tokens of prompt and T of output.

    Prompts are padded on the left and outputs on the right. So `prompt_ids` followed by
    `output_ids` is one sequence without a gap. A named tuple is a pytree, so a jitted function
    takes it as it is.

    Attributes:
        prompt_ids: [N, P] int32, `pad_id` on the left.
        prompt_mask: [N, P] bool, True at the prompt's tokens.
        output_ids: [N, T] int32, the end token included, `pad_id` on the right.
        output_mask: [N, T] bool, True at the output's tokens.
        logprobs: [N, T] float32, of each output token when it was sampled; 0 in the padding.
        weight_versions: [N, T], the weights that each output token came from. int32, with -1 in the
            padding. If a version is a str or does not fit int32: objects, with None in the padding.
            `jit` does not take those.
        prompt_index: [N] int32, the prompt's index in the call. Samples of one prompt are a group.
        sample_index: [N] int32, the sample's index of that prompt.
        aborted: [N] bool, ended early (`finish_reason` "abort"). Such a row has its prompt and no
            output, so it cannot enter a loss.
        truncated: [N] bool, ended by `max_new_tokens` (`finish_reason` "length").
        sampling_mask: [N, T, K] int32, the ids that each token was sampled from, -1 behind them. A
            row of only -1 means the whole vocabulary. None without `return_sampling_mask`.
        sampling_logprobs: [N, T] float32, of each token among these ids. None if `sampling_mask` is
            None.
        lora_versions: [N, T], as `weight_versions`, of the adapter that each token came from.
            None if all outputs are the base's.
    """

    prompt_ids: np.ndarray
    prompt_mask: np.ndarray
    output_ids: np.ndarray
    output_mask: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    prompt_index: np.ndarray
    sample_index: np.ndarray
    aborted: np.ndarray
    truncated: np.ndarray
    sampling_mask: np.ndarray | None = None
    sampling_logprobs: np.ndarray | None = None
    lora_versions: np.ndarray | None = None


def checked_logprobs(batch: RolloutBatch, trainer_logprobs: ArrayLike) -> np.ndarray:
    """A trainer's log-probabilities as an array, one for each output token of the batch."""
    trainer = np.asarray(trainer_logprobs)
    if trainer.shape != batch.logprobs.shape:
        raise InvalidRequest(
            f"trainer_logprobs has shape {trainer.shape}, the batch's are {batch.logprobs.shape}: "
            "expected one for each output token, padding included"
        )
    return trainer


def pad_results(
    results: Iterable[Mapping[str, Any]],
    prompts: Sequence[ArrayLike] | np.ndarray,
    *,
    pad_id: int,
    max_prompt: int | None = None,
    max_output: int | None = None,
    max_sampling_mask: int | None = None,
    pad_to_multiple_of: int = 64,
) -> RolloutBatch:
    """Turn the results of one call into arrays of few different shapes, so that a jitted trainer
    rarely compiles again.

    Args:
        results: The results of `generate_all`, `generate` or `as_completed` with
            `return_logprob=True`.
        prompts: The ids of that call's prompts (its `input_ids`), by `prompt_index`.
        pad_id: The id in the padding. The masks say where padding is.
        max_prompt: P. None: the least multiple of `pad_to_multiple_of` that all prompts fit.
        max_output: T. None: the least multiple of `pad_to_multiple_of` that all outputs fit.
            Nothing is ever cut.
        max_sampling_mask: K. None: the least power of two that all masks fit.

    Raises:
        InvalidRequest: A prompt, an output or a mask is longer than its maximum, a result has no
            log-probabilities, only some results have masks, or the results are of other prompts.
    """
    rows = [_Row(index, result, prompts) for index, result in enumerate(results)]
    for name, value in (("max_prompt", max_prompt), ("max_output", max_output)):
        if value is not None and value < 1:
            raise InvalidRequest(f"{name}={value}: expected 1 or more, or None")
    if pad_to_multiple_of < 1:
        raise InvalidRequest(f"pad_to_multiple_of={pad_to_multiple_of}: expected 1 or more")
    num_prompt = _width(rows, "prompt", max_prompt, pad_to_multiple_of)
    num_output = _width(rows, "output", max_output, pad_to_multiple_of)
    shape = len(rows), num_output
    adapted = any(row.lora_spans for row in rows)
    batch = RolloutBatch(
        prompt_ids=np.full((len(rows), num_prompt), pad_id, np.int32),
        prompt_mask=np.zeros((len(rows), num_prompt), bool),
        output_ids=np.full((len(rows), num_output), pad_id, np.int32),
        output_mask=np.zeros((len(rows), num_output), bool),
        logprobs=np.zeros((len(rows), num_output), np.float32),
        weight_versions=_versions(shape, [row.spans for row in rows]),
        prompt_index=np.array([row.prompt_index for row in rows], np.int32),
        sample_index=np.array([row.sample_index for row in rows], np.int32),
        aborted=np.array([row.finish == "abort" for row in rows], bool),
        truncated=np.array([row.finish == "length" for row in rows], bool),
        lora_versions=_versions(shape, [row.lora_spans for row in rows]) if adapted else None,
    )
    for index, row in enumerate(rows):
        start, end = num_prompt - len(row.prompt), len(row.output)
        batch.prompt_ids[index, start:] = row.prompt
        batch.prompt_mask[index, start:] = True
        batch.output_ids[index, :end] = row.output
        batch.output_mask[index, :end] = True
        batch.logprobs[index, :end] = row.logprobs
    return _with_masks(batch, rows, max_sampling_mask)


def _with_masks(batch: RolloutBatch, rows: list[_Row], limit: int | None) -> RolloutBatch:
    kept = [(index, row.kept) for index, row in enumerate(rows) if row.kept is not None]
    with_masks = [index for index, one in kept if one.given]
    if not with_masks:
        return batch
    if len(with_masks) < len(kept):
        missing = next(index for index, one in kept if not one.given)
        raise InvalidRequest(
            f"result {missing} has no output_sampling_mask, and result {with_masks[0]} has one; "
            "pass results of calls with the same return_sampling_mask",
            prompt_index=rows[missing].prompt_index,
        )
    shape = batch.output_ids.shape
    masks = np.full((*shape, width([one for _, one in kept], limit)), -1, np.int32)
    logprobs = np.zeros(shape, np.float32)
    for index, one in kept:
        one.fill(masks[index])
        logprobs[index, : len(one.logprobs)] = one.logprobs
    return batch._replace(sampling_mask=masks, sampling_logprobs=logprobs)


class _Row:
    """One result, checked. An aborted result has no output."""

    def __init__(
        self, index: int, result: Mapping[str, Any], prompts: Sequence[ArrayLike] | np.ndarray
    ) -> None:
        meta = result["meta_info"]
        self.prompt_index: int = meta["prompt_index"]
        self.sample_index: int = meta["sample_index"]
        if self.prompt_index >= len(prompts):
            raise InvalidRequest(
                f"result {index} belongs to none of the {len(prompts)} prompts given; pass "
                "all prompts of the call, in its order",
                prompt_index=self.prompt_index,
            )
        self.prompt = np.asarray(prompts[self.prompt_index])
        if self.prompt.shape != (meta["prompt_tokens"],) or self.prompt.dtype.kind not in "iu":
            raise InvalidRequest(
                f"expected the {meta['prompt_tokens']} ids that the engine was given, got shape "
                f"{self.prompt.shape} of {self.prompt.dtype}; pass the call's input_ids",
                prompt_index=self.prompt_index,
            )
        if meta["finish_reason"] is None:
            raise InvalidRequest(
                f"result {index} is a chunk of an unfinished output; pass its last chunk",
                prompt_index=self.prompt_index,
            )
        self.finish: str = meta["finish_reason"]["type"]
        self.output: Sequence[int] = []
        self.logprobs: list[float] = []
        self.spans: list[_Span] = []
        self.lora_spans: list[_Span] = []
        self.kept: KeptIds | None = None
        if self.finish != "abort":
            if "output_token_logprobs" not in meta:
                raise InvalidRequest(
                    f"result {index} has no log-probabilities; call with return_logprob=True",
                    prompt_index=self.prompt_index,
                )
            self.output = result["output_ids"]
            self.logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
            self.spans = meta["weight_versions"]
            self.lora_spans = meta.get("lora_versions", [])
            self.kept = KeptIds(meta, self.prompt_index)


def _width(rows: list[_Row], what: str, limit: int | None, multiple: int) -> int:
    longest = max(rows, key=lambda row: len(getattr(row, what)), default=None)
    tokens = len(getattr(longest, what)) if longest else 0
    if limit is None:
        return max(-(-tokens // multiple), 1) * multiple
    if longest and tokens > limit:
        remedy = " or sample with fewer max_new_tokens" if what == "output" else ""
        raise InvalidRequest(
            f"sample {longest.sample_index}: the {what} has {tokens} tokens, more than "
            f"max_{what}={limit}; raise it{remedy}",
            prompt_index=longest.prompt_index,
        )
    return limit


def _versions(shape: tuple[int, int], rows: list[list[_Span]]) -> np.ndarray:
    """The version of each token, in a dtype that holds all labels; padding elsewhere."""
    labels = {version for spans in rows for *_, version in spans}
    if all(isinstance(v, int) and _INT32.min <= v <= _INT32.max for v in labels):
        versions = np.full(shape, -1, np.int32)
    else:
        versions = np.full(shape, None, object)
    for index, spans in enumerate(rows):
        for first, last, version in spans:
            versions[index, first:last] = version
    return versions
