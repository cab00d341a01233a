"""What happens to outputs in the driver, and what goes over the wire, without Ray or hosts."""

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from enginepool import PoolClosed, PoolFailed, RequestsFailed
from enginepool.ray.call import Output
from enginepool.ray.wire import News, pack_tree, unpack_tree
from tests.support.ray_calls import ray_call


def result(output: Output, ids: list[int], kind: str | None = "length") -> dict[str, Any]:
    reason = None if kind is None else {"type": kind}
    return {"text": "", "output_ids": ids, "meta_info": {**output.meta, "finish_reason": reason}}


def test_a_call_is_its_samples_in_order() -> None:
    call = ray_call(2, 1, logprob_start_len=1, lora_path="x")
    own = {"logprob_start_len": 1, "lora_path": "x"}
    attempt = call.outputs[1].attempt(5)
    assert attempt.sampling_params["n"] == 1
    assert attempt.options == {"prompt_indices": [0], "sample_indices": [1], **own}
    assert call.outputs[2].options == {"prompt_indices": [1], "sample_indices": [0], **own}
    groups = [output.group for output in call.outputs]
    assert groups[0] == groups[1] != groups[2]
    for output in reversed(call.outputs):
        call.finish(output, result(output, [output.position]))
    assert call.done.is_set()
    assert [r["output_ids"] for r in call.results()] == [[0], [1], [2]]


def test_an_attempt_continues_with_reported_tokens() -> None:
    """And with its random stream, so that the seed in the result repeats all of them."""
    (output,) = ray_call(1).outputs
    first = output.attempt(0)
    assert "partial_outputs" not in first.options
    output.latest = result(output, [7, 8], None)
    second = output.attempt(1)
    assert second.options["partial_outputs"] == [output.latest]
    assert second.sampling_params == first.sampling_params
    assert second.sampling_params["sampling_seed"] == 5


def test_it_is_not_blamed_while_it_gains_tokens() -> None:
    (output,) = ray_call(1).outputs
    for tokens in range(1, 9):
        assert output.lost_with(tokens % 2)
        assert output.suspect
        output.gain(result(output, [7] * tokens, None))
        assert not output.suspect


def test_a_suspect_reports_at_once_that_it_continues() -> None:
    (output,) = ray_call(1).outputs
    first = output.attempt(0).sampling_params
    output.lost_with(0)
    again = output.attempt(1).sampling_params
    assert first["stream_interval"] > again["stream_interval"] == 1


def test_calls_that_fail_together_have_their_own_results() -> None:
    error, calls = PoolClosed("the pool was closed"), [ray_call(1), ray_call(2)]
    for call in calls:
        call.fail(error)
    caught = []
    for call in calls:
        with pytest.raises(PoolClosed, match="was closed") as raised:
            call.results()
        caught.append(raised.value)
    assert [len(one.results) for one in caught] == [1, 2]


def test_an_output_that_takes_two_hosts_down_is_poison() -> None:
    (output,) = ray_call(1).outputs
    output.gain(result(output, [3], None))
    assert output.lost_with(0)
    output.gain(result(output, [3], None))  # nothing new
    assert not output.lost_with(1)
    assert output.done
    (ended,) = output.call.results()
    assert ended["meta_info"]["finish_reason"]["err_type"] == "poisoned"
    assert ended["output_ids"] == [3]
    with pytest.raises(RequestsFailed) as caught:
        output.call.results(raise_on_error=True)
    assert caught.value.results == [ended]


def test_a_call_that_fails_has_its_results() -> None:
    call = ray_call(1, 1)
    call.finish(call.outputs[0], result(call.outputs[0], [3]))
    call.fail(PoolFailed("no host is left"))
    assert call.done.is_set()
    with pytest.raises(PoolFailed, match="no host") as caught:
        call.results()
    assert [r["output_ids"] for r in caught.value.results] == [[3], []]


def test_news_that_were_not_heard_are_joined() -> None:
    told = News(3, [(1, {})], {2: {"text": "a"}, 4: {}})
    told.add(News(4, [(5, {})], {2: {"text": "ab"}}))
    assert told == News(4, [(1, {}), (5, {})], {2: {"text": "ab"}, 4: {}})


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_arrays_travel_without_a_copy(dtype: Any) -> None:
    source = {
        "a": {"b": np.arange(6).reshape(2, 3).astype(dtype)},
        "c": [np.ones((), dtype)],
        "d": "no array",
    }
    buffers: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(pack_tree(source), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    other = unpack_tree(pickle.loads(packed, buffers=buffers))
    assert other["a"]["b"].dtype == dtype
    np.testing.assert_array_equal(other["a"]["b"], source["a"]["b"])
    np.testing.assert_array_equal(other["c"][0], source["c"][0], strict=True)
    assert other["d"] == source["d"]
