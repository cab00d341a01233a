"""Chunks have the text and the ids so far. The last one equals the result."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from enginepool import EnginePool, InvalidRequest
from enginepool.toy.files import END_ID
from tests.pool.test_generation import params
from tests.support.liveness import at_rest, until

Chunk = dict[str, Any]


def by_output(chunks: Iterable[Chunk]) -> dict[int, list[Chunk]]:
    """The chunks of each `index`, checked for what holds in every stream."""
    outputs: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        outputs.setdefault(chunk["index"], []).append(chunk)
    for chunks_of_one in outputs.values():
        for before, after in pairwise(chunks_of_one):
            assert before["meta_info"]["finish_reason"] is None
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert after["output_ids"] is not before["output_ids"]
        assert chunks_of_one[-1]["meta_info"]["finish_reason"] is not None
    return outputs


def test_last_chunk_equals_the_result(pool: EnginePool):
    """Text, ids and log-probabilities, also for a text of random bytes. Earlier chunks have
    their beginnings. A caller who changes a chunk changes nothing else."""
    prompts, each = ["a", "你是谁", "🙂🙂"], params(40, 60, 25)
    results = pool.generate_all(prompts, each, return_logprob=True, top_logprobs_num=2)
    chunks = []
    for chunk in pool.stream(prompts, each, return_logprob=True, top_logprobs_num=2):
        chunks.append(chunk | {"output_ids": list(chunk["output_ids"])})
        chunk["output_ids"].clear()
    outputs = by_output(chunks)
    assert sorted(outputs) == [0, 1, 2]
    for index, result in enumerate(results):
        last = outputs[index][-1]
        assert (last["text"], last["output_ids"]) == (result["text"], result["output_ids"])
        meta, expected = last["meta_info"], result["meta_info"]
        assert meta["finish_reason"] == expected["finish_reason"]
        assert meta["prompt_index"] == expected["prompt_index"] == index
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert len(meta[name]) == meta["completion_tokens"] == len(last["output_ids"])
            assert [[e[1] for e in flat(row)] for row in meta[name]] == (
                [[e[1] for e in flat(row)] for row in expected[name]]
            )
        for chunk in outputs[index]:
            assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])


def flat(row: Any) -> list[Any]:
    return row if isinstance(row, list) else [row]


def test_chunks_come_while_the_engine_runs(scripted: EnginePool):
    """The first chunk of a long output is not its last."""
    stream = scripted.stream("0", params(200)[0])
    first = next(stream)
    assert len(first["output_ids"]) < 200
    assert len(list(stream)[-1]["output_ids"]) == 200


def test_characters_of_several_bytes_come_whole(scripted: EnginePool):
    """No chunk has a part of a character, and no character is lost."""
    text = ""
    for chunk in scripted.stream("你", params(130)[0]):
        assert "\ufffd" not in chunk["text"]
        text = chunk["text"]
    assert text == "是谁🙂你" * 10  # 13 bytes a round


def test_an_output_that_ends_inside_a_character_shows_it(scripted: EnginePool):
    """The last text equals that of `generate`, with the incomplete character."""
    last = list(scripted.stream("你", params(4)[0]))[-1]
    assert last["text"] == scripted.generate("你", params(4)[0])["text"] == "是\ufffd"


@pytest.mark.parametrize(
    ("stop", "trimmed", "whole"),
    [
        ("56", "34", "3456"),
        (["zz", "567", "6789"], "34", "34567"),
        (["9012", "90"], "345678", "34567890"),
    ],
)
def test_stop_strings_are_cut_unless_asked_for(
    scripted: EnginePool, stop: Any, trimmed: str, whole: str
):
    """No chunk shows a beginning of a stop string that is cut in the end. The ids keep it."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "stop": stop}
    for no_stop_trim, expected in ((False, trimmed), (True, whole)):
        (chunks,) = by_output(
            scripted.stream("2", sampling | {"no_stop_trim": no_stop_trim})
        ).values()
        assert chunks[-1]["text"] == expected
        assert bytes(chunks[-1]["output_ids"]).decode() == whole
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        result = scripted.generate("2", sampling | {"no_stop_trim": no_stop_trim})
        assert (result["text"], result["output_ids"]) == (expected, chunks[-1]["output_ids"])


def test_stop_string_of_several_bytes(scripted: EnginePool):
    """The output stops at its last byte, and its first bytes are not shown."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "stop": "🙂"}
    (chunks,) = by_output(scripted.stream("你", sampling)).values()
    assert chunks[-1]["text"] == "是谁"
    assert bytes(chunks[-1]["output_ids"]).decode() == "是谁🙂"


def test_what_might_have_become_a_stop_string_is_shown_in_the_end(scripted: EnginePool):
    """A tail that was held back while the request ran belongs to the text if nothing stopped it."""
    sampling = {"temperature": 0, "max_new_tokens": 4, "stop": "56x"}
    (chunks,) = by_output(scripted.stream("2", sampling)).values()
    assert chunks[-1]["text"] == "3456"


def test_stop_token_is_in_the_ids_and_not_in_the_text(scripted: EnginePool):
    """For the model's end token and for the caller's stop token."""
    (chunks,) = by_output(scripted.stream("w", {"temperature": 0})).values()
    assert chunks[-1]["text"] == "xyz"
    assert chunks[-1]["output_ids"] == [*b"xyz", END_ID]
    stopped = scripted.generate(
        "w", {"temperature": 0, "stop_token_ids": [ord("z")]}, return_logprob=True
    )
    assert (stopped["text"], stopped["output_ids"]) == ("xy", list(b"xyz"))
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord("z")}
    assert len(stopped["meta_info"]["output_token_logprobs"]) == 3
    kept = scripted.generate(
        "w", {"temperature": 0, "stop_token_ids": [ord("z")], "no_stop_trim": True}
    )
    assert kept["text"] == "xyz"


def test_special_tokens_are_shown_on_request(scripted: EnginePool):
    """`skip_special_tokens=False` shows special tokens inside the text. The stop token is still
    cut."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2}
    assert scripted.generate("y", sampling)["text"] == "z"
    shown = scripted.generate("y", sampling | {"skip_special_tokens": False})
    assert shown["text"] == "z<|im_end|>"
    stopped = scripted.generate("y", {"temperature": 0, "skip_special_tokens": False})
    assert (stopped["text"], stopped["output_ids"]) == ("z", [ord("z"), END_ID])


def test_index_identifies_samples(pool: EnginePool):
    """With n > 1 `index` is the position of the output in the list that `generate_all` returns."""
    sampling = {"n": 3, "max_new_tokens": 12, "sampling_seed": 7, "ignore_eos": True}
    outputs = by_output(pool.stream(["a", "b"], sampling))
    assert sorted(outputs) == list(range(6))
    results = pool.generate_all(["a", "b"], sampling)
    for index, chunks in outputs.items():
        assert chunks[-1]["output_ids"] == results[index]["output_ids"]
        assert chunks[-1]["meta_info"]["prompt_index"] == index // 3
        assert chunks[-1]["meta_info"]["sample_index"] == index % 3


def test_stream_interval(scripted: EnginePool):
    """A chunk comes whenever a multiple of the interval is reached, and at the end. With several
    steps a launch, several tokens come at a time."""
    chunks = list(scripted.stream("0", params(23)[0] | {"stream_interval": 5}))
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths[-1] == 23
    reached = [length // 5 for length in lengths[:-1]]
    assert 0 not in reached
    assert reached == sorted(set(reached))


@pytest.mark.anyio
async def test_async_stream(scripted: EnginePool):
    """The same chunks on asyncio and trio."""
    prompts, each = ["0", "你", "a"], params(30, 26, 28)
    chunks = [chunk async for chunk in scripted.async_stream(prompts, each)]
    outputs = by_output(chunks)
    results = scripted.generate_all(prompts, each)
    for index, result in enumerate(results):
        assert outputs[index][-1]["text"] == result["text"]
        assert outputs[index][-1]["output_ids"] == result["output_ids"]


def test_closing_a_stream_ends_its_requests(scripted: EnginePool):
    """Also inside the engines: no request of the call runs on."""
    aborted = scripted.stats()["aborted"]
    stream = scripted.stream(["0", "你"], params(400, 400))
    next(stream)
    stream.close()
    until(lambda: at_rest(scripted))
    assert scripted.stats()["aborted"] == aborted + 2


def test_bad_input_is_raised_by_the_call_itself(scripted: EnginePool):
    """Not at the first chunk, when other code may have the iterator."""
    with pytest.raises(InvalidRequest, match="max_new_tokens=0"):
        scripted.stream("a", {"max_new_tokens": 0})
