"""A request's min_p reaches the sampler.

What breaks: min_p has no effect on a running engine. Even min_p 1.0, which permits the likeliest
token alone, changes nothing.

Why: `ScheduleBatch._merge_sampling_info` builds the sampler's input without `need_min_p_sampling`,
which keeps its default, False.

What we change: When the sampler's metadata is built, the flag is set if any request of the batch
has a min_p above 0. The flag is an argument of the compiled program, not a constant in it.

Remove when: Upstream passes the flag from the requests to the sampler.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.sampling.sampling_batch_info"


def _is_needed(original) -> bool:
    """Merge a batch with min_p .5 as the scheduler does, and build the metadata without a
    device."""
    schedule_batch = module("sgl_jax.srt.managers.schedule_batch")
    info = SimpleNamespace(
        reqs=[],
        seq_lens=np.ones(1, np.int32),
        sampling_info=module(_MODULE).SamplingBatchInfo(
            temperatures=np.ones((1, 1), np.float32),
            top_ps=np.ones(1, np.float32),
            top_ks=np.ones(1, np.int32),
            min_ps=np.full(1, 0.5, np.float32),
            vocab_size=8,
            need_min_p_sampling=True,
            penalizer_orchestrator=SimpleNamespace(is_required=False),
        ),
    )
    batch = SimpleNamespace(reqs_info=[info], dp_size=1, has_grammar=False)
    worker_batch = SimpleNamespace(
        sampling_info=schedule_batch.ScheduleBatch._merge_sampling_info(batch, 1, 1),
        positions=np.zeros(1, np.int32),
        seq_lens=np.ones(1, np.int32),
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    build = with_globals(
        original.__func__,
        NamedSharding=lambda mesh, spec: None,
        device_array=lambda arrays, sharding: arrays,
        _get_or_create_zero_penalty_device=lambda shape, sharding: None,
    )
    return not build(lambda **fields: fields, worker_batch)["need_min_p_sampling"]


def _replace(original):
    def from_model_worker_batch(cls, batch, *args, **kwargs):
        info = batch.sampling_info
        info.need_min_p_sampling = info.need_min_p_sampling or bool((info.min_ps > 0).any())
        return original(cls, batch, *args, **kwargs)

    return from_model_worker_batch


PATCH = Patch(
    name="min_p_ignored",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "SamplingMetadata.from_model_worker_batch",
            _replace,
            ("cls", "batch", "pad_size", "mesh", "vocab_size"),
        ),
    ),
    probe=_is_needed,
)
