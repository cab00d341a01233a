"""A request that resumes reserves room only for the tokens that it may still sample.

What breaks: A long request that was retracted because the KV cache was full, or that continues on
another engine, may wait for ever. Not even an empty engine admits it.

Why: `PrefillAdder.add_one_req` reserves `max_new_tokens` beside the outputs that the request has,
which are part of its input now. Both together can exceed the whole KV cache.

What we change: While a request is considered, its outputs are subtracted from its `max_new_tokens`.
For a request without outputs nothing changes.

Remove when: Upstream subtracts `len(req.output_ids)` there, as it does for running requests.
"""

from types import SimpleNamespace

from patches._patch import Patch, Target

_INPUT, _LIMIT, _OUTPUTS = 90, 60, 50


class _NoRoom(int):
    """Stands for the free KV cache, and keeps what was compared with it."""

    def __init__(self, *_):
        self.wanted = []

    def __le__(self, wanted):
        self.wanted.append(wanted)
        return True


def _is_needed(original) -> bool:
    """Admit a request with outputs, and see how much room is asked for."""
    room = _NoRoom()
    adder = SimpleNamespace(
        tree_cache=SimpleNamespace(disable=False),
        ceil_paged_tokens=lambda tokens: tokens,
        rem_total_tokens_for_dp=lambda dp_rank: room,
    )
    params = SimpleNamespace(ignore_eos=False, max_new_tokens=_LIMIT)
    req = SimpleNamespace(
        sampling_params=params,
        output_ids=[1] * _OUTPUTS,
        dp_rank=None,
        extend_input_len=_INPUT,
        host_hit_length=0,
        prefix_indices=[],
    )
    original(adder, req)
    return room.wanted[0] > _INPUT + _LIMIT - _OUTPUTS


def _replace(original):
    def add_one_req(self, req):
        params, sampled = req.sampling_params, len(req.output_ids)
        params.max_new_tokens -= sampled
        try:
            return original(self, req)
        finally:
            params.max_new_tokens += sampled

    return add_one_req


PATCH = Patch(
    name="resumed_reservation",
    issue="not reported",
    replaced=(
        Target(
            "sgl_jax.srt.managers.schedule_policy",
            "PrefillAdder.add_one_req",
            _replace,
            ("self", "req"),
        ),
    ),
    probe=_is_needed,
)
