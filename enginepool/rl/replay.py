"""Repeats recorded results, and compares."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest

if TYPE_CHECKING:
    from enginepool import EnginePool

_MASK, _AMONG = "output_sampling_mask", "output_token_sampling_logprobs"
_EXPERTS = "routed_experts"


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        tokens: The number of tokens that were sampled again.
        other_ids: [result, position] of the first id of an output that differs. Later positions of
            that output are not compared.
        logprob: The largest difference of a token's log-probability. If the recorded and the new
            mask are equal, the log-probability among their ids counts too.
        other_masks: [result, position] of tokens that were sampled from other ids.
        other_experts: [result, position] of tokens that were routed to other experts.
        results: The new results.
    """

    tokens: int
    other_ids: list[tuple[int, int]]
    logprob: float
    other_masks: list[tuple[int, int]]
    other_experts: list[tuple[int, int]]
    results: list[dict[str, Any]]

    @property
    def same(self) -> bool:
        """Whether ids, masks and experts are the same."""
        return not (self.other_ids or self.other_masks or self.other_experts)


def replay(
    pool: EnginePool,
    results: Sequence[Mapping[str, Any]],
    prompts: Sequence[ArrayLike],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    version: int | str,
) -> Replay:
    """Repeat the tokens that were sampled with one version of the weights. The pool must have these
    weights now.

    Args:
        results: Results with `return_logprob=True`. Masks and experts are compared if the results
            have them. The results may come from any pool, and from calls without a seed.
        prompts: The ids of that call's prompts, by `prompt_index`.
        sampling_params: The parameters of that call: one dict for all prompts, or one per prompt.
        version: The version of the base to repeat. For an adapter, the pool's current version is
            repeated. Tokens of other versions are fed in and not sampled. The replay computes their
            KV with `version`. If the recorded run computed it with older weights (an update with
            `mode="in_place"`), results may differ.

    Raises:
        InvalidRequest: A result was made without `return_logprob`, or `prompts` or
            `sampling_params` has no entry for it.
    """
    adapters = pool.stats().get("lora_adapters", {})
    parts = [
        _Replayed(index, result, prompts, sampling_params, start, end)
        for index, result in enumerate(results)
        for start, end in _spans(result["meta_info"], version, adapters)
    ]
    metas = [part.meta for part in parts]
    made = pool.generate_all(
        None,
        [part.params for part in parts],
        input_ids=[part.prompt for part in parts],
        prompt_indices=[meta["prompt_index"] for meta in metas],
        sample_indices=[meta["sample_index"] for meta in metas],
        partial_outputs=[part.given for part in parts],
        lora_path=[meta.get("lora_path") for meta in metas],
        return_logprob=True,
        return_sampling_mask=any(_MASK in meta for meta in metas),
        return_routed_experts=any(_EXPERTS in meta for meta in metas),
    )
    for part, result in zip(parts, made, strict=True):
        part.compare(result)
    return Replay(
        tokens=sum(part.end - part.start for part in parts),
        other_ids=[place for part in parts for place in part.other_ids],
        logprob=max((part.logprob for part in parts), default=0.0),
        other_masks=[place for part in parts for place in part.other_masks],
        other_experts=[place for part in parts for place in part.other_experts],
        results=made,
    )


class _Replayed:
    """The tokens of one result that one version of the weights has sampled."""

    def __init__(
        self,
        index: int,
        result: Mapping[str, Any],
        prompts: Sequence[ArrayLike],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        start: int,
        end: int,
    ) -> None:
        self._index, self._result, self.meta = index, result, result["meta_info"]
        if "output_token_logprobs" not in self.meta:
            raise InvalidRequest(
                f"result {index} has no log-probabilities; call with return_logprob=True",
                prompt_index=self.meta["prompt_index"],
            )
        self.start, self.end = start, end
        of = self.meta["prompt_index"]
        self.prompt = np.asarray(_entry("prompts", prompts, of)).tolist()
        several = isinstance(params, list | tuple)
        own = _entry("sampling_params", params, of) if several else params
        self.params = _until(own, end) | {"n": 1, "sampling_seed": self.meta["sampling_seed"]}
        self.other_ids: list[tuple[int, int]] = []
        self.other_masks: list[tuple[int, int]] = []
        self.other_experts: list[tuple[int, int]] = []
        self.logprob = 0.0

    @property
    def given(self) -> dict[str, Any] | None:
        """The part of the output before `start`, as `partial_outputs` takes it. None if there is
        none."""
        if not self.start:
            return None
        entries = self.meta["output_token_logprobs"][: self.start]
        meta: dict[str, Any] = {"output_token_logprobs": entries}
        if _MASK in self.meta:
            bounds = self.meta[_MASK]["indptr"][: self.start + 1]
            meta[_MASK] = {
                "indptr": bounds,
                "ids": self.meta[_MASK]["ids"][: bounds[-1]],
                "too_many": [e for e in self.meta[_MASK]["too_many"] if e[0] < self.start],
            }
            meta[_AMONG] = self.meta[_AMONG][: self.start]
        return {"output_ids": self._result["output_ids"][: self.start], "meta_info": meta}

    def compare(self, made: Mapping[str, Any]) -> None:
        ids, new = self._result["output_ids"][: self.end], made["output_ids"]
        differ = [place for place, (a, b) in enumerate(zip(ids, new, strict=False)) if a != b]
        end = differ[0] if differ else min(len(ids), len(new))
        if end < len(ids):
            self.other_ids.append((self._index, end))
        self.other_masks = self._other(_masks, made, range(self.start, end))
        both = zip(_values(self.meta, end), _values(made["meta_info"], end), strict=False)
        own, *among = (np.abs(np.subtract(*pair)) for pair in both)
        for gaps in among:
            gaps[[place for _, place in self.other_masks]] = 0.0  # not comparable
        self.logprob = max(float(gaps[self.start :].max(initial=0.0)) for gaps in (own, *among))
        before = len(self.prompt) - 1  # the row that the first token was sampled from
        rows = range(before + self.start, before + end)
        self.other_experts = [
            (index, row - before) for index, row in self._other(_experts, made, rows)
        ]

    def _other(self, of: Any, made: Mapping[str, Any], places: range) -> list[tuple[int, int]]:
        old, new = of(self.meta), of(made["meta_info"])
        if old is None or new is None:
            return []
        return [(self._index, place) for place in places if old[place] != new[place]]


def _spans(
    meta: Mapping[str, Any], version: int | str, adapters: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The [first token, end] of the tokens that these weights and adapters have sampled."""
    spans = [(start, end) for start, end, label in meta["weight_versions"] if label == version]
    if (adapter := adapters.get(meta.get("lora_path") or "")) is None:
        return spans
    newest = adapter["weight_version"]
    of_adapter = [(start, end) for start, end, label in meta["lora_versions"] if label == newest]
    both = [(max(a, c), min(b, d)) for a, b in spans for c, d in of_adapter]
    return [(start, end) for start, end in both if start < end]


def _entry(name: str, entries: Any, index: int) -> Any:
    try:
        return entries[index]
    except (IndexError, TypeError):
        raise InvalidRequest(
            f"{name} has no entry {index}; pass those of the call, for all its prompts",
            prompt_index=index,
        ) from None


def _until(params: Any, end: int) -> dict[str, Any]:
    """The parameters of an output that has `end` tokens."""
    if not isinstance(params, Mapping):
        raise InvalidRequest(
            f"sampling_params: expected a dict, got {type(params).__name__}; if the call had none, "
            "pass those of the checkpoint's generation_config.json"
        )
    until: dict[str, Any] = {**params, "max_new_tokens": end}
    if least := until.get("min_new_tokens"):
        until["min_new_tokens"] = min(least, end)
    return until


def _values(meta: Mapping[str, Any], end: int) -> list[np.ndarray]:
    """The log-probabilities of the tokens before `end`. With a mask, also those among its ids."""
    own = [value for value, *_ in meta["output_token_logprobs"]]
    each = [own, meta[_AMONG]] if _MASK in meta else [own]
    return [np.array(values[:end]) for values in each]


def _masks(meta: Mapping[str, Any]) -> list[Any] | None:
    if (mask := meta.get(_MASK)) is None:
        return None
    counts = dict(mask["too_many"])
    bounds = mask["indptr"]
    return [
        counts.get(place, mask["ids"][bounds[place] : bounds[place + 1]])
        for place in range(len(bounds) - 1)
    ]


def _experts(meta: Mapping[str, Any]) -> list[Any] | None:
    if not (text := meta.get(_EXPERTS)):  # empty: nothing was computed
        return None
    positions = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    rows = np.frombuffer(base64.b64decode(text), np.int32).reshape(positions, -1)
    return [row.tobytes() for row in rows]
