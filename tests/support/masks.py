"""The ids that a law leaves, in NumPy, and checks of the ids in results."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forced import logprobs, output_logits

NAMES = ("output_sampling_mask", "output_token_sampling_logprobs")
# The allowed errors of a log-probability and of a sum of probabilities.
SLACK = 1e-4


def left(law: np.ndarray, given: dict[str, Any], slack: float = 0.0) -> np.ndarray:
    """The ids that top-k, top-p and min-p leave, in this order, of a row of log-probabilities.

    Args:
        slack: Above 0: only the ids that are left for sure. Below 0: all ids that may be left.
    """

    def down_to(least: float) -> np.ndarray:
        """If the last id that is left and the next one are close, either may be left."""
        after, out = kept & (law >= least), kept & (law < least)
        if slack > 0:
            return after & (law > law[out].max(initial=-np.inf) + slack)
        return after | (out & (law >= least + slack)) if slack < 0 else after

    kept = law > -np.inf
    top_k = given.get("top_k", -1) if given["temperature"] else 1
    if 0 < top_k < len(law):
        kept = down_to(np.sort(law)[-top_k])
    if (top_p := given.get("top_p", 1.0)) < 1 and kept.any():
        odds = np.where(kept, np.exp(law), 0.0)
        order = np.argsort(-odds, kind="stable")
        before = np.cumsum(odds[order]) - odds[order]
        last = np.flatnonzero(before < (top_p - slack) * odds.sum())[-1]
        kept = down_to(law[order[last]])
    if (min_p := given.get("min_p", 0.0)) and kept.any():
        kept = down_to(law[kept].max() + np.log(min_p))
    return kept


def rows_of(meta: dict[str, Any]) -> list[list[int]]:
    """The mask's ids by position. Empty: all."""
    mask = meta["output_sampling_mask"]
    assert mask["too_many"] == []
    ids, bounds = mask["ids"], mask["indptr"]
    assert bounds[0] == 0
    assert bounds[-1] == len(ids)
    return [ids[a:b] for a, b in pairwise(bounds)]


def cut(result: dict[str, Any], count: int) -> dict[str, Any]:
    """The entries of an output's first tokens."""
    mask, values = (result["meta_info"][name] for name in NAMES)
    bounds = mask["indptr"][: count + 1]
    too_many = [entry for entry in mask["too_many"] if entry[0] < count]
    kept = {"indptr": bounds, "ids": mask["ids"][: bounds[-1]], "too_many": too_many}
    return {NAMES[0]: kept, NAMES[1]: values[:count]}


def assert_masks(
    model: Path,
    prompts: Sequence[Sequence[int]],
    given: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
    banned: Any,
) -> int:
    """The ids at each position are those that the reference's law leaves.

    Args:
        banned: Returns the ids that may not come, for an output, its parameters and a position.

    Returns:
        At how many positions rounding could decide nothing.
    """
    outputs = [result["output_ids"] for result in results]
    logits = output_logits(model, prompts, outputs)
    certain = 0
    for one, output, law, result in zip(given, outputs, logits, results, strict=True):
        meta = result["meta_info"]
        rows, values = rows_of(meta), meta["output_token_sampling_logprobs"]
        assert len(rows) == len(values) == len(output) > 0
        for place, (row, token, value) in enumerate(zip(rows, output, values, strict=True)):
            scaled = penalised(law[place], output[:place], one)
            scaled[[*banned(output, one, place)]] = -np.inf
            scaled = logprobs(scaled[None], one["temperature"] or 1.0)[0]
            mask = np.zeros(len(scaled), bool)
            mask[row or slice(None)] = True
            assert row == sorted(set(row))
            assert mask[token]
            least, most = left(scaled, one, SLACK), left(scaled, one, -SLACK)
            assert (mask[least]).all(), (one, place)
            assert (most[mask]).all(), (one, place)
            own = scaled[token] - np.log(np.exp(scaled[mask]).sum())
            assert abs(value - own) < SLACK / min(1.0, one["temperature"] or 1.0)
            certain += bool((least == most).all())
    return certain


def penalised(row: np.ndarray, before: Sequence[int], given: dict[str, Any]) -> np.ndarray:
    counts = np.bincount(before, minlength=len(row))
    row = row.astype(np.float64) - counts * given.get("frequency_penalty", 0.0)
    return row - (counts > 0) * given.get("presence_penalty", 0.0)
