"""Stop strings that the model spells in more tokens than the tokenizer would."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.merges import give_merges
from enginepool import EnginePool
from tests.support.forced import write_scripted_model
from tests.support.liveness import SECONDS, callers, paused, running, until
from tests.support.pools import SMALL
from tests.support.steady import several_at_once

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL, ITS_ID = "<|im_start|>", 257


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """An engine that spells, byte by byte: letters up to z, digits, and 你是谁🙂 for ever."""
    folder = write_scripted_model(tmp_path_factory.mktemp("spelling"))
    give_merges(folder, ["efg", "谁🙂"], first_id=259)
    with several_at_once(), EnginePool(str(folder), devices=1, warmup="none", **SMALL) as pool:
        yield pool


def spell(
    pool: EnginePool, prompt: str, stop: Any, given: Sequence[int] = (), **params: Any
) -> dict[str, Any]:
    """The result of a prompt whose output begins with `given`."""
    values = [(-1.0, token, None) for token in given]
    part = {"output_ids": list(given), "meta_info": {"output_token_logprobs": values}}
    [result] = pool.generate_all(
        input_ids=[list(prompt.encode())],
        sampling_params={"temperature": 0, "max_new_tokens": 60, "stop": stop} | params,
        return_logprob=True,
        partial_outputs=[part] if given else None,
    )
    assert len(result["output_ids"]) == len(result["meta_info"]["output_token_logprobs"])
    return result


STOPS: dict[str, tuple[str, Any, str, str]] = {
    # the prompt's last letter, the stop string, the text, the sampled ids
    "one token of the tokenizer's": ("a", "efg", "bcd", "bcdefg"),
    "by the first token": ("a", "b", "", "b"),
    "the first of several that is complete": ("a", ["zzz", "defgh", "efg", "hi"], "bcd", "bcdefg"),
    "the longest of two": ("a", ["fg", "efg"], "bcd", "bcdefg"),
    "characters of several bytes": ("你", "谁🙂", "是", "是谁🙂"),
    "a character, before it is": ("你", "是谁", "", "是谁"),
    "at the last token that is allowed": ("a", LETTERS[5:24], "bcde", LETTERS[1:24]),
}


@pytest.mark.parametrize("case", STOPS)
def test_text_and_ids_end_there(pool: EnginePool, case: str) -> None:
    """Trimmed or not, alone, beside others, and in a stream, which shows no part of the stop
    string."""
    prompt, stop, text, sampled = STOPS[case]
    ids = list(sampled.encode())
    longest = len(ids) if "allowed" in case else 60
    result = spell(pool, prompt, stop, max_new_tokens=longest)
    assert (result["text"], result["output_ids"]) == (text, ids)
    assert result["meta_info"]["finish_reason"]["type"] == "stop"
    whole = spell(pool, prompt, stop, max_new_tokens=longest, no_stop_trim=True)
    assert (whole["text"], whole["output_ids"]) == (sampled, ids)
    params = {"temperature": 0, "max_new_tokens": longest, "stop": stop}
    prompts = [list(prompt.encode()), [ord("0")], list(prompt.encode())]
    ways = [params | {"n": 3}, params, params | {"no_stop_trim": True}]
    together = pool.generate_all(input_ids=prompts, sampling_params=ways)
    assert [one["text"] for one in (*together[:3], together[4])] == [text] * 3 + [sampled]
    assert [one["output_ids"] for one in (*together[:3], together[4])] == [ids] * 4
    chunks = list(pool.stream(input_ids=prompts[0], sampling_params=params))
    assert all(text.startswith(chunk["text"]) for chunk in chunks)
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (text, ids)


@pytest.mark.parametrize(("given", "text"), [("b", "bcd"), ("bcde", "bcd"), ("bcdef", "bcd")])
def test_outputs_that_go_on(pool: EnginePool, given: str, text: str) -> None:
    """A stop string may begin in the given part."""
    result = spell(pool, "a", "efg", list(given.encode()))
    assert (result["text"], result["output_ids"]) == (text, list(b"bcdefg"))


def test_given_outputs_stay(pool: EnginePool) -> None:
    """A stop string that the given part has before its last token ends nothing and cuts nothing.
    One that the given part's last token completes ends the output at once."""
    result = spell(pool, "a", ["cd", "hi"], list(b"bcde"))
    assert (result["text"], result["output_ids"]) == ("bcdefg", list(b"bcdefghi"))
    result = spell(pool, "a", "de", list(b"bcdefgde"))
    assert (result["text"], result["output_ids"]) == ("bcdefg", list(b"bcdefgde"))


def test_special_tokens(pool: EnginePool) -> None:
    """Stop strings are looked for in the text with special tokens and in the text without."""
    given = [*b"bc", ITS_ID, ord("d")]
    result = spell(pool, "a", f"c{SPECIAL}def", given)
    assert (result["text"], result["output_ids"]) == ("b", [*given, *b"ef"])
    result = spell(pool, "a", "cdef", given)
    assert (result["text"], result["output_ids"]) == ("b", [*given, *b"ef"])
    result = spell(pool, "a", ["cdef", "z"], given, skip_special_tokens=False)
    assert result["text"] == f"bc{SPECIAL}{LETTERS[3:25]}"


def test_bytes_of_no_character(pool: EnginePool) -> None:
    """Any number of such bytes may come before the stop string."""
    given = [0x80] * 40 + [ord("d")]
    result = spell(pool, "a", "efg", given)
    assert result["output_ids"] == [*given, *b"efg"]
    assert result["text"] == "\ufffd" * 40 + "d"


def test_taken_back(pool: EnginePool) -> None:
    """A request that resumes after a retract knows its text."""
    text = "1234567890" * 30
    with callers(1) as executor:
        call = executor.submit(spell, pool, "0", [text, "z"], max_new_tokens=400)
        until(lambda: running(pool) == 1)
        for _ in range(3):
            before = pool.stats()["engines"][0]["steps"]
            until(lambda n=before: call.done() or pool.stats()["engines"][0]["steps"] > n + 20)
            with paused(pool, "retract"):
                pass
        result = call.result(SECONDS)
    assert (result["text"], len(result["output_ids"])) == ("", len(text))
