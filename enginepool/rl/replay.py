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

_MASK, _EXPERTS = "output_sampling_mask", "routed_experts"


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        tokens: The number of tokens that were sampled again.
        other_ids: [result, position] of the first id of an output that differs. Later positions of
            that output are not compared.
        logprob: The largest difference of a log-probability.
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
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
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
        version: The version to repeat. Tokens of other versions are fed in and not sampled.

    Raises:
        InvalidRequest: A result was made without `return_logprob`.
    """
    parts = [
        _Replayed(index, result, prompts, sampling_params, start, end)
        for index, result in enumerate(results)
        for start, end, label in result["meta_info"]["weight_versions"]
        if label == version
    ]
    metas = [part.meta for part in parts]
    made = pool.generate_all(
        None,
        [part.params for part in parts],
        input_ids=[part.prompt for part in parts],
        prompt_indices=[meta["prompt_index"] for meta in metas],
        sample_indices=[meta["sample_index"] for meta in metas],
        partial_outputs=[part.given for part in parts],
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
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
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
        self.prompt = np.asarray(prompts[of]).tolist()
        own = params if isinstance(params, Mapping | None) else params[of]
        changed = {"n": 1, "max_new_tokens": end, "sampling_seed": self.meta["sampling_seed"]}
        self.params = {**(own or {}), **changed}
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
            values = self.meta["output_token_sampling_logprobs"]
            meta["output_token_sampling_logprobs"] = values[: self.start]
        return {"output_ids": self._result["output_ids"][: self.start], "meta_info": meta}

    def compare(self, made: Mapping[str, Any]) -> None:
        ids, new = self._result["output_ids"][: self.end], made["output_ids"]
        differ = [place for place, (a, b) in enumerate(zip(ids, new, strict=False)) if a != b]
        end = differ[0] if differ else min(len(ids), len(new))
        if end < len(ids):
            self.other_ids.append((self._index, end))
        both = [one["output_token_logprobs"] for one in (self.meta, made["meta_info"])]
        for old, other in zip(*(entries[self.start : end] for entries in both), strict=True):
            self.logprob = max(self.logprob, abs(old[0] - other[0]))
        self.other_masks = self._other(_masks, made, range(self.start, end))
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
    if (text := meta.get(_EXPERTS)) is None:
        return None
    positions = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    rows = np.frombuffer(base64.b64decode(text), np.int32).reshape(positions, -1)
    return [row.tobytes() for row in rows]
