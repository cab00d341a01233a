"""A call that is part of a larger batch: its prompts' and samples' indices, and partial outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginepool.dispatch.routed_experts import RoutedTokens
from enginepool.dispatch.sampling_mask import Kept
from enginepool.errors import InvalidRequest
from enginepool.frontend.call_options import CallOptions
from enginepool.frontend.limits import Limits, check_ids
from enginepool.frontend.logprob_options import Logprobs
from enginepool.frontend.routed_experts import EXPERTS, read_experts
from enginepool.frontend.sampling import PromptSampling
from enginepool.frontend.sampling_mask import LOGPROBS, MASK, read_mask
from enginepool.values import is_int, is_number, plain, shown


@dataclass(frozen=True)
class PartialOutput:
    """The tokens that one output has already. Its fields have the meaning that they have in
    `Request`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[list[float], list[int]]] = field(default_factory=list)
    named_logprobs: list[list[float]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    experts: RoutedTokens | None = None
    weight_versions: list[list[Any]] = field(default_factory=list)
    lora_versions: list[list[Any]] = field(default_factory=list)
    prompt_weight_versions: list[int | str] = field(default_factory=list)

    def for_a_request(self) -> dict[str, Any]:
        """The arguments of a `Request` that continues this output."""
        given = len(self.output_ids)
        return {
            "given": given,
            "retracted_at": given,
            "output_ids": list(self.output_ids),
            "logprobs": list(self.logprobs),
            "top_logprobs": list(self.top_logprobs),
            "named_logprobs": list(self.named_logprobs),
            "kept": list(self.kept),
            "experts": self.experts,
            "weight_versions": [list(span) for span in self.weight_versions],
            "lora_versions": [list(span) for span in self.lora_versions],
            "prompt_weight_versions": list(self.prompt_weight_versions),
        }


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
            _Reading(index, one, logprobs).partial(limits, len(prompts[index]))
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


class _Reading:
    """Reads one entry of `partial_outputs`: a result or a chunk, whole or in part."""

    def __init__(self, index: int, given: Any, logprobs: Logprobs) -> None:
        self._index, self._named_ids = index, logprobs.named_ids[index]
        self._sampling_mask, self._routed_experts = logprobs.sampling_mask, logprobs.routed_experts
        self._given: Mapping[str, Any] = {} if given is None else given
        self._needed = {
            "output_token_logprobs": "return_logprob=True" if logprobs.outputs else "",
            "output_top_logprobs": f"top_logprobs_num={logprobs.top}" if logprobs.top else "",
            "output_token_ids_logprobs": "token_ids_logprob" if self._named_ids else "",
        }

    def partial(self, limits: Limits, prompt_tokens: int) -> PartialOutput:
        meta = self._given.get("meta_info") if isinstance(self._given, Mapping) else self._given
        if not isinstance(meta, Mapping | None):
            raise self._refusal(
                f"{shown(self._given)}: expected a dict like a result, with output_ids, "
                "and output_token_logprobs in meta_info"
            )
        ids = plain(self._given.get("output_ids", []))
        if not (isinstance(ids, list | tuple) and all(map(is_int, ids))):
            raise self._refusal(f"output_ids {shown(ids)}: expected a list of token ids")
        if not ids:
            return PartialOutput()
        check_ids(ids, "the partial output", self._index, limits)
        meta = meta or {}
        top = self._entries(meta, "output_top_logprobs", len(ids))
        return PartialOutput(
            list(ids),
            self._logprobs(meta, ids),
            [([e[0] for e in entries], [e[1] for e in entries]) for entries in top or ()],
            self._named(meta, len(ids)),
            self._kept(meta, len(ids)),
            self._experts(meta, prompt_tokens + len(ids) - 1, limits),
            self._spans(meta, "weight_versions", len(ids)),
            self._spans(meta, "lora_versions", len(ids)),
            list(meta.get("prompt_weight_versions") or ()),
        )

    def _logprobs(self, meta: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
        entries = self._entries(meta, "output_token_logprobs", len(ids))
        if entries is None:
            return [0.0] * len(ids)  # engines need one value per id; no result shows these
        values = []
        for entry, token_id in zip(entries, ids, strict=True):
            value, of = (entry[0], entry[1]) if isinstance(entry, list | tuple) else (entry, None)
            if of not in (None, token_id) or not (is_number(value) and math.isfinite(value)):
                raise self._refusal(
                    f"output_token_logprobs: {shown(entry)}: expected (logprob, {token_id}, None) "
                    "with a finite logprob"
                )
            values.append(float(value))
        return values

    def _named(self, meta: Mapping[str, Any], count: int) -> list[list[float]]:
        if not self._named_ids:
            return []
        rows = []
        for row in self._entries(meta, "output_token_ids_logprobs", count) or ():
            try:
                values, ids = zip(*((value, token_id) for value, token_id, *_ in row), strict=True)
            except (TypeError, ValueError):
                values, ids = (), ()
            if ids != tuple(self._named_ids) or not all(map(is_number, values)):
                raise self._refusal(
                    f"output_token_ids_logprobs: {shown(row)}: expected (logprob, id, None) of "
                    f"{shown(list(self._named_ids))} in this order"
                )
            rows.append([float(value) for value in values])
        return rows

    def _kept(self, meta: Mapping[str, Any], count: int) -> list[Kept]:
        if not self._sampling_mask:
            return []
        try:
            return read_mask(meta, count)
        except (TypeError, ValueError, KeyError):
            raise self._refusal(
                f"meta_info {MASK} {shown(meta.get(MASK))} with {LOGPROBS}: expected the "
                f"result's values for {count} output_ids, because of return_sampling_mask=True"
            ) from None

    def _experts(
        self, meta: Mapping[str, Any], positions: int, limits: Limits
    ) -> RoutedTokens | None:
        """The experts of the partial output. None if it has none: in a stream only the last chunk
        has them."""
        text = meta.get(EXPERTS)
        if not (self._routed_experts and text and limits.routing):
            return None
        try:
            return read_experts(text, limits.routing, positions)
        except (TypeError, ValueError):
            raise self._refusal(
                f"meta_info {EXPERTS} {shown(text)}: expected the result's value for "
                f"{positions} positions"
            ) from None

    def _entries(self, meta: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
        """One entry per id. None if there are none and the call needs none."""
        entries = plain(meta.get(name))
        if entries is None and not self._needed[name]:
            return None
        if not isinstance(entries, list | tuple) or len(entries) != count:
            have = len(entries) if isinstance(entries, list | tuple) else shown(entries)
            why = f", because of {self._needed[name]}" if self._needed[name] else ""
            raise self._refusal(
                f"meta_info {name}: {have}: expected one entry for each of {count} output_ids{why}"
            )
        return list(entries)

    def _spans(self, meta: Mapping[str, Any], name: str, count: int) -> list[list[Any]]:
        """The spans of the partial output's versions. Empty if it has none."""
        spans = plain(meta.get(name)) or []
        try:
            spans = [[start, end, version] for start, end, version in spans]
            bounds = [bound for span in spans for bound in span[:2]]
            # The last tokens may be the base's, without an adapter's version.
            least = 0 if name == "lora_versions" else count
            fits = not spans or (bounds == sorted(bounds) and least <= bounds[-1] <= count)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise self._refusal(
                f"meta_info {name} {shown(spans)}: expected spans [start, end, version] "
                f"that end at {count}"
            )
        return spans

    def _refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"partial_outputs: {what}", prompt_index=self._index)
