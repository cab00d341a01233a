"""Calls of a pool on many hosts, as its driver makes them."""

from typing import Any

from enginepool.ray.call import RayCall
from enginepool.ray.wire import Prepared


def ray_call(*counts: int, every: bool = False, **meta: Any) -> RayCall:
    """A call with one prompt for each count, and so many samples of it."""
    prepared = [
        Prepared(
            [1, 2],
            {"n": 9},
            {"prompt_index": prompt, "sample_index": sample, "sampling_seed": 5, **meta},
        )
        for prompt, count in enumerate(counts)
        for sample in range(count)
    ]
    return RayCall(prepared, {}, every=every)
