"""The ids that output tokens were sampled from, as results have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from enginepool.dispatch.sampling_mask import Kept
from enginepool.values import is_int, is_number, plain

MASK, LOGPROBS = "output_sampling_mask", "output_token_sampling_logprobs"


def mask_entries(kept: Sequence[Kept]) -> dict[str, Any]:
    """The entries of `meta_info`, for these positions."""
    ids = [one.ids for one in kept]
    return {
        MASK: {
            "indptr": list(accumulate(map(len, ids), initial=0)),
            "ids": np.concatenate(ids).tolist() if ids else [],
            "too_many": [
                [position, one.count]
                for position, one in enumerate(kept)
                if one.count > len(one.ids)
            ],
        },
        LOGPROBS: [one.logprob for one in kept],
    }


def mask_rows(mask: Mapping[str, Any]) -> list[list[int] | int | None]:
    """For each position: the list of ids, their number if they are too many to be listed, or None
    for all ids."""
    ids, bounds = mask["ids"], mask["indptr"]
    rows: list[list[int] | int | None] = [ids[start:end] or None for start, end in pairwise(bounds)]
    for position, count in mask["too_many"]:
        rows[position] = count
    return rows


def read_mask(meta: Mapping[str, Any], count: int) -> list[Kept]:
    """
    Raises:
        ValueError, TypeError, KeyError: The entries do not have `count` positions.
    """
    mask, logprobs = plain(meta[MASK]), plain(meta[LOGPROBS])
    ids, bounds = mask["ids"], mask["indptr"]
    too_many = dict(mask["too_many"])
    if not (
        all(map(is_int, [*ids, *bounds, *too_many, *too_many.values()]))
        and all(map(is_number, logprobs))
        and len(logprobs) == len(bounds) - 1 == count
        and [0, *sorted(bounds)] == [0, *bounds]
        and (bounds[0], bounds[-1]) == (0, len(ids))
    ):
        raise ValueError(mask)
    rows = np.split(np.array(ids, np.int32), bounds[1:-1]) if count else []
    return [
        Kept(too_many.get(position, len(row)), row, float(logprob))
        for position, (row, logprob) in enumerate(zip(rows, logprobs, strict=True))
    ]
