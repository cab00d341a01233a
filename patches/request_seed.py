"""A request's sampling_seed is honoured.

What breaks: `sampling_params["sampling_seed"]` is silently ignored. The same prompt with the same
seed gives other tokens every time.

Why: `SamplingBatchInfo.from_schedule_batch` reads seeds only with `enable_deterministic_sampling`,
a setting of the whole process.

What we change: If every request of the batch has an integer seed, the sampler gets those seeds,
whatever the setting. Otherwise it gets what upstream gives it. The seeds are read from the requests
each time a batch goes to the worker, so batches with and without seeds can be merged. (Upstream's
merge would leave seeds of the wrong length and fail.) A batch with seeds and one without are two
compiled programs.

Remove when: Upstream honours the seed of a request without a setting of the process.
"""

import numbers
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches._lookup import module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.managers.schedule_batch"


def _is_needed(original) -> bool:
    """Build and merge the sampling info of one request with a seed, with the setting off."""
    sampling = module("sgl_jax.srt.sampling.sampling_batch_info")
    params = module("sgl_jax.srt.sampling.sampling_params").SamplingParams(sampling_seed=7)

    class SettingOff(sampling.SamplingBatchInfo):
        @classmethod
        def _get_global_server_args_dict(cls):
            return {"enable_deterministic_sampling": False}

    info = _Info([SimpleNamespace(sampling_params=params, output_ids=[], grammar=None)])
    info.sampling_info = SettingOff.from_schedule_batch(info, 8)
    batch = SimpleNamespace(reqs_info=[info], dp_size=1, has_grammar=False)
    seeds = original(batch, 1, 1).sampling_seeds
    return seeds is None or list(seeds) != [7]


class _Info:
    """Stands for upstream's info of one rank's requests."""

    def __init__(self, reqs):
        self.reqs = reqs
        self.seq_lens = np.ones(len(reqs), np.int32)
        self.sampling_info: Any = None


def _seeds(reqs) -> np.ndarray | None:
    """Return the requests' seeds, or None unless each has one."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    if not all(type(s) is int or isinstance(s, numbers.Integral) for s in seeds):
        return None
    # Modulo 2**32, because an Engine beside the pool does not check them.
    return np.array([int(seed) & 0xFFFFFFFF for seed in seeds], np.uint32).view(np.int32)


def _replace(original):
    def merge_sampling_info(self, per_dp_bs_size, total_bs):
        merged = original(self, per_dp_bs_size, total_bs)
        # As upstream pads seeds.
        padding = module("sgl_jax.srt.sampling.sampling_params").DEFAULT_SAMPLING_SEED
        seeds = np.full(total_bs, padding, dtype=np.int32)
        if not any(info.reqs for info in self.reqs_info):
            return merged
        for rank, info in enumerate(self.reqs_info):
            of_rank = _seeds(info.reqs or ())
            if of_rank is None:
                return merged
            seeds[rank * per_dp_bs_size :][: len(of_rank)] = of_rank
        merged.sampling_seeds = seeds
        return merged

    return merge_sampling_info


PATCH = Patch(
    name="request_seed",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "ScheduleBatch._merge_sampling_info",
            _replace,
            ("self", "per_dp_bs_size", "total_bs"),
        ),
    ),
    probe=_is_needed,
)
