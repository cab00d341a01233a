"""Which request has which row of a decode batch."""

from typing import Any

import numpy as np
from sgl_jax.srt.managers.schedule_batch import Req
from sgl_jax.srt.sampling.sampling_params import SamplingParams

from enginepool.engine.steady.device_batch import FROM_TABLE
from enginepool.engine.steady.extras import Extras
from enginepool.engine.steady.input_batch import InputBatch
from enginepool.lora.adapter import NO_SLOT

VOCABULARY = 272


def prefilled(name: str, *, tokens: int) -> Req:
    """A request of upstream's with two prompt tokens and its first output token."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    params.sampling_seed = 0
    req: Any = Req(name, "", [1, 2], params)
    req.output_ids, req.kv_committed_len = [3], 2
    req.output_token_logprobs_val, req.output_token_logprobs_idx = [0.0], [3]
    return req


def step(batch: InputBatch, token: int) -> list[int]:
    """Every row gets this token. Returns the rows that have ended."""
    ids = np.full((1, len(batch.reqs)), token, np.int32)
    return batch.append_tokens(ids, np.zeros(ids.shape, np.float32), Extras())


def test_the_row_of_an_ended_request_is_free_for_another() -> None:
    """It gets no more tokens, and the next request gets its row, from the step after its own."""
    batch = InputBatch(3, VOCABULARY, lambda _: None, lambda _: (NO_SLOT, 0.0))
    short, long = prefilled("short", tokens=2), prefilled("long", tokens=9)
    assert batch.add_requests([short, long], [FROM_TABLE] * 2, after=0) == [0, 1]
    assert (batch.active.tolist(), batch.free) == ([0, 1], 1)

    assert step(batch, 4) == [0]
    batch.remove([0])
    assert (batch.active.tolist(), batch.free) == ([1], 2)
    assert step(batch, 5) == []
    assert (short.output_ids, long.output_ids) == ([3, 4], [3, 4, 5])

    others = [prefilled("third", tokens=9), prefilled("fourth", tokens=9)]
    assert batch.add_requests(others, [FROM_TABLE] * 2, after=3) == [0, 2]
    assert (batch.active.tolist(), batch.free) == ([0, 1, 2], 0)
    step(batch, 6)  # the third step was launched before they came
    step(batch, 7)
    assert [req.output_ids for req in others] == [[3, 7], [3, 7]]
    assert long.output_ids == [3, 4, 5, 6, 7]
