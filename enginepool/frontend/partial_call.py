"""A call that is part of a larger batch: its prompts' and samples' indices, and partial outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.frontend.call_options import CallOptions
from enginepool.frontend.limits import Limits
from enginepool.frontend.logprob_options import Logprobs
from enginepool.frontend.partial_output import PartialOutput, Reading
from enginepool.frontend.sampling import PromptSampling
from enginepool.values import is_int, plain, shown


@dataclass(frozen=True)
class BatchPart:
    """This call as a part of the larger batch: indices there, and partial outputs. One entry per
    prompt."""

    prompt_indices: Sequence[int]
    sample_indices: Sequence[int] | None
    partial_outputs: Sequence[PartialOutput]

    def samples(self, index: int, n: int) -> Sequence[int]:
        """The sample indices that are wanted of prompt `index`."""
        return range(n) if self.sample_indices is None else [self.sample_indices[index]]


def read_batch_part(
    options: CallOptions,
    sampling: Sequence[PromptSampling],
    prompts: Sequence[Sequence[int]],
    logprobs: Logprobs,
    limits: Limits,
) -> BatchPart:
    """
    Raises:
        InvalidRequest: The error names the prompt by its index in this call.
    """
    prompt_indices = options.get("prompt_indices")
    sample_indices = options.get("sample_indices")
    partial_outputs = options.get("partial_outputs")
    count = len(prompts)
    for name, value in (("sample_indices", sample_indices), ("partial_outputs", partial_outputs)):
        several = [index for index, one in enumerate(sampling) if one.n > 1]
        if value is not None and several:
            raise InvalidRequest(
                f"{name} with n={sampling[several[0]].n}: repeat the prompt once per sample, with "
                "n=1 and one entry of sample_indices each",
                prompt_index=several[0],
            )
    partials = [PartialOutput()] * count
    if partial_outputs is not None:
        given = _one_a_prompt("partial_outputs", partial_outputs, count)
        partials = [
            Reading(index, one, logprobs).partial(limits, len(prompts[index]))
            for index, one in enumerate(given)
        ]
    for index, (partial, one) in enumerate(zip(partials, sampling, strict=True)):
        _check_length(index, partial, one, limits.total - len(prompts[index]))
    samples = None if sample_indices is None else _indices("sample_indices", sample_indices, count)
    return BatchPart(
        range(count)
        if prompt_indices is None
        else _indices("prompt_indices", prompt_indices, count),
        samples,
        partials,
    )


def _one_a_prompt(name: str, value: Any, count: int) -> list[Any]:
    value = plain(value)
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise InvalidRequest(f"{name}: expected a list, one entry per prompt, got {shown(value)}")
    entries = list(value)
    if len(entries) != count:
        raise InvalidRequest(f"{name} has {len(entries)} entries for {count} prompts")
    return entries


def _indices(name: str, value: Any, count: int) -> list[int]:
    entries = _one_a_prompt(name, value, count)
    for index, entry in enumerate(entries):
        if not (is_int(entry) and entry >= 0):
            raise InvalidRequest(
                f"{name}: {shown(entry)}: expected an integer, 0 or more", prompt_index=index
            )
    return entries


def _check_length(index: int, partial: PartialOutput, sampling: PromptSampling, room: int) -> None:
    wanted = sampling.params.max_new_tokens
    most = room if wanted is None else min(wanted, room)
    # `room` is negative for a long prompt that is only scored.
    if len(partial.output_ids) > max(0, most):
        raise InvalidRequest(
            f"its partial output has {len(partial.output_ids)} tokens, and at most {max(0, most)} "
            f"are allowed (max_new_tokens={wanted}, room for {room})",
            prompt_index=index,
        )
