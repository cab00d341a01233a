"""Bad input gets a clear error before the call starts anything, and the next call is right."""

import math
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest
from tests.support.liveness import idle, until
from tests.support.pools import MakePool

IDS = [65, 66, 67]
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


def traces(pool: EnginePool) -> tuple[Any, ...]:
    """Everything that shows that a call has started."""
    until(lambda: idle(pool))
    stats = pool.stats()
    counts = [stats[name] for name in ("finished", "aborted", "prompt_tokens", "waiting")]
    return *counts, *[engine["steps"] for engine in stats["engines"]]


def refused(pool: EnginePool, call: Callable[[], Any], *words: str, prompt: int | None) -> None:
    """The call raises InvalidRequest, which names the prompt and all `words`. Nothing has
    started."""
    before = traces(pool)
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert caught.value.prompt_index == prompt
    message = str(caught.value)
    if prompt is not None:
        assert message.startswith(f"prompt {prompt}: ")
    for word in words:
        assert word in message, message
    assert traces(pool) == before


@pytest.fixture(scope="module")
def right(pool: EnginePool) -> Callable[[], None]:
    """Checks that the pool still gives its first answers."""
    expected = pool.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]
    assert len(expected) == 4

    def check() -> None:
        assert pool.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"] == expected

    return check


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"input_ids": [IDS, []]}, ["empty", "at least one token"]),
        ({"prompts": ["a", ""]}, ["empty", "at least one token"]),
        ({"prompts": ["a", "b\ud800"]}, ["does not take", "ud800"]),
        ({"input_ids": [IDS, [65, 66.0]]}, ["66.0", "not an integer"]),
        ({"input_ids": [IDS, [65, "66"]]}, ["'66'", "not an integer"]),
        ({"input_ids": [IDS, [65, True]]}, ["True", "not an integer"]),
        ({"input_ids": [IDS, [65, None]]}, ["None", "not an integer"]),
        ({"input_ids": [IDS, [[65]]]}, ["[65]", "not an integer"]),
        ({"input_ids": [IDS, 65]}, ["65", "list of token ids"]),
        ({"input_ids": [IDS, "AB"]}, ["'AB'", "list of token ids"]),
        ({"input_ids": [IDS, b"AB"]}, ["b'AB'", "list of token ids"]),
        ({"input_ids": [IDS, np.array([1.5])]}, ["1.5", "not an integer"]),
        ({"input_ids": [IDS, [65, -1]]}, ["-1", "outside the vocabulary", "0 to "]),
        ({"input_ids": [IDS, [65, 10**6]]}, ["1000000", "outside the vocabulary", "0 to "]),
        ({"input_ids": [IDS, [65] * 4000]}, ["4000 tokens", "too many", "context_length=512"]),
        ({"prompts": ["a", "b" * 4000]}, ["4000 tokens", "too many", "shorten"]),
        ({"prompts": ["a", 5]}, ["expected a string", "int 5", "input_ids="]),
        ({"prompts": ["a", None]}, ["expected a string", "NoneType"]),
        ({"prompts": ["a", [65, 66]]}, ["expected a string", "list [65, 66]", "input_ids="]),
        ({"prompts": ["a", {"role": "user"}]}, ["expected a string", "chat()"]),
    ],
)
def test_prompt(pool: EnginePool, prompts: dict[str, Any], words: list[str]) -> None:
    """A bad prompt is refused with its index and its value. The good prompt beside it never
    runs."""
    refused(pool, lambda: pool.generate_all(**prompts), *words, prompt=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["prompts or input_ids"]),
        ({"prompts": "a", "input_ids": IDS}, ["prompts or input_ids", "not both"]),
        ({"prompts": 5}, ["prompts", "5"]),
        ({"input_ids": 5}, ["input_ids", "5"]),
        ({"prompts": {"text": "a"}}, ["prompts", "list"]),
        ({"prompts": b"ab"}, ["prompts", "b'ab'"]),
        ({"sampling_params": [{}, {}]}, ["2 entries for 1 prompts", "one dict"]),
        ({"sampling_params": []}, ["0 entries for 1 prompts"]),
        ({"sampling_params": 5}, ["sampling_params", "5"]),
        ({"sampling_params": "greedy"}, ["sampling_params", "'greedy'"]),
        ({"top_logprobs_num": -1}, ["top_logprobs_num=-1", "0 to 20"]),
        ({"top_logprobs_num": 21}, ["top_logprobs_num=21", "0 to 20"]),
        ({"top_logprobs_num": 1.5}, ["top_logprobs_num=1.5", "0 to 20"]),
        ({"top_logprobs_num": True}, ["top_logprobs_num=True", "0 to 20"]),
        ({"timeout": 0}, ["timeout=0", "above 0"]),
        ({"timeout": -1.5}, ["timeout=-1.5", "above 0"]),
        ({"timeout": math.nan}, ["timeout=nan", "above 0"]),
        ({"timeout": "soon"}, ["timeout='soon'", "above 0"]),
        ({"timeout": math.inf}, ["timeout=inf", "finite", "None for no limit"]),
        ({"timeout": True}, ["timeout=True", "above 0"]),
        ({"return_logprob": "no"}, ["return_logprob='no'", "True or False"]),
        ({"raise_on_error": "no"}, ["raise_on_error='no'", "True or False"]),
    ],
)
def test_call(pool: EnginePool, arguments: dict[str, Any], words: list[str]) -> None:
    """A wrong argument of the whole call is refused with its name and value."""
    if not arguments.keys() & {"prompts", "input_ids"} and arguments:
        arguments = {"input_ids": [IDS], **arguments}
    refused(pool, lambda: pool.generate_all(**arguments), *words, prompt=None)


BAD_PARAMETERS: list[tuple[dict[Any, Any], list[str]]] = [
    ({"max_tokens": 5}, ["unknown", "max_tokens=5", "did you mean max_new_tokens?"]),
    ({"temprature": 1}, ["unknown", "did you mean temperature?"]),
    ({"regex": "("}, ["regex='('", "does not compile", "unclosed group"]),
    ({"json_schema": "{"}, ["json_schema='{'", "not JSON"]),
    ({"seed": 1}, ["unknown", "sampling_seed"]),
    ({"logprobs": 1}, ["unknown", "logprobs=1", "here it is return_logprob=True"]),
    ({"beam_width": 2}, ["unknown", "beam_width=2"]),
    ({"temperature": -0.1}, ["temperature=-0.1", "0 (greedy) or more"]),
    ({"temperature": math.nan}, ["temperature=nan", "0 (greedy) or more"]),
    ({"temperature": math.inf}, ["temperature=inf", "0 (greedy) or more"]),
    ({"temperature": "hot"}, ["temperature='hot'", "number"]),
    ({"temperature": True}, ["temperature=True", "number"]),
    ({"top_p": 0.0}, ["top_p=0.0", "above 0 and at most 1"]),
    ({"top_p": 1.01}, ["top_p=1.01", "above 0 and at most 1"]),
    ({"top_p": math.nan}, ["top_p=nan", "above 0 and at most 1"]),
    ({"min_p": 1.5}, ["min_p=1.5", "between 0 and 1"]),
    ({"min_p": -0.5}, ["min_p=-0.5", "between 0 and 1"]),
    ({"top_k": 0}, ["top_k=0", "-1 (all)"]),
    ({"top_k": -2}, ["top_k=-2", "-1 (all)"]),
    ({"top_k": 2.5}, ["top_k=2.5", "-1 (all)"]),
    ({"frequency_penalty": 2.5}, ["frequency_penalty=2.5", "between -2 and 2"]),
    ({"presence_penalty": -math.inf}, ["presence_penalty=-inf", "between -2 and 2"]),
    ({"max_new_tokens": 0}, ["max_new_tokens=0", "integer", "1 or more"]),
    ({"max_new_tokens": -1}, ["max_new_tokens=-1", "1 or more"]),
    ({"max_new_tokens": 1 << 31}, ["max_new_tokens=2147483648", "up to 2147483647"]),
    ({"max_new_tokens": 1.5}, ["max_new_tokens=1.5", "integer"]),
    ({"max_new_tokens": "9"}, ["max_new_tokens='9'", "integer"]),
    ({"max_new_tokens": 4000}, ["max_new_tokens=4000", "3 prompt tokens", "room for 5"]),
    ({"min_new_tokens": -1}, ["min_new_tokens=-1", "0 or more"]),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens", "9"]),
    ({"n": 0}, ["n=0", "1 or more"]),
    ({"n": 1 << 21}, ["n=2097152", "up to 1048576"]),
    ({"n": 1.0}, ["n=1.0", "integer"]),
    ({"stream_interval": 0}, ["stream_interval=0", "1 or more"]),
    ({"sampling_seed": 2**31}, ["sampling_seed=2147483648", "32-bit"]),
    ({"sampling_seed": -(2**31) - 1}, ["sampling_seed=-2147483649", "32-bit"]),
    ({"sampling_seed": 1.5}, ["sampling_seed=1.5", "32-bit"]),
    ({"repetition_penalty": 1.1}, ["repetition_penalty=1.1", "ignores it", "leave it out"]),
    ({"logit_bias": {"5": 1.0}}, ["logit_bias={'5': 1.0}", "ignores it", "leave it out"]),
    ({"stop": ""}, ["stop=''", "non-empty"]),
    ({"stop": ["x", 5]}, ["stop=['x', 5]", "string"]),
    ({"stop_token_ids": 5}, ["stop_token_ids=5", "list of token ids"]),
    ({"stop_token_ids": [-1]}, ["stop_token_ids=[-1]", "list of token ids", "0 to "]),
    ({"stop_token_ids": [65, 10**6]}, ["1000000", "list of token ids", "0 to "]),
    ({"ignore_eos": "yes"}, ["ignore_eos='yes'", "True or False"]),
    ({"no_stop_trim": 1}, ["no_stop_trim=1", "True or False"]),
    ({"temperature": 10**400}, ["temperature=1000", "0 (greedy) or more"]),
    ({5: 1}, ["unknown", "5=1"]),
]


@pytest.mark.parametrize(("params", "words"), BAD_PARAMETERS)
def test_sampling_parameter(pool: EnginePool, params: dict[str, Any], words: list[str]) -> None:
    """A sampling parameter is refused if it is unknown, out of range or of a wrong type, or if
    upstream would ignore it. In a list of parameters the error has the index of the prompt."""
    whole = None if "max_new_tokens" not in params or params["max_new_tokens"] != 4000 else 0
    refused(pool, lambda: pool.generate_all(input_ids=[IDS], sampling_params=params), *words,
            prompt=whole)  # fmt: skip
    in_list = [GREEDY, None, params]
    refused(
        pool,
        lambda: pool.generate_all(input_ids=[IDS] * 3, sampling_params=in_list),
        *words,
        prompt=2,
    )


def test_not_a_dict(pool: EnginePool) -> None:
    """In a list of parameters, an element that is no dict is refused with the index of its
    prompt."""
    refused(
        pool,
        lambda: pool.generate_all(input_ids=[IDS, IDS], sampling_params=[GREEDY, 5]),
        "expected a dict",
        "5",
        prompt=1,
    )


@pytest.mark.parametrize(
    ("messages", "words", "prompt"),
    [
        ([], ["messages are empty"], None),
        ([[{"role": "user", "content": "12+7="}], []], ["empty"], 1),
        ("12+7=", ["messages", "'12+7='"], None),
        (["12+7="], ["'12+7='", "list of messages"], 0),
        ([{"role": "user"}], ["content"], 0),
        ([{"content": "12+7="}], ["role"], 0),
        ([[{"role": "user", "content": "12+7="}], [{"role": "user"}]], ["content"], 1),
        ([[{"role": "user", "content": "12+7="}], ["12+7="]], ["'12+7='", "role"], 1),
        (5, ["messages", "5"], None),
    ],
)
def test_chat_messages(
    pool: EnginePool, messages: Any, words: list[str], prompt: int | None
) -> None:
    """A value that is no conversation is refused with its index."""
    refused(pool, lambda: pool.chat(messages), *words, prompt=prompt)


def test_every_verb_refuses(pool: EnginePool) -> None:
    """All calls and their async twins check before they start. The sync iterators check as soon
    as they are called."""
    bad: dict[str, Any] = {"input_ids": [IDS, [-1]]}
    for verb in (pool.generate, pool.generate_all, pool.stream, pool.as_completed):
        refused(pool, lambda verb=verb: verb(**bad), "-1", prompt=1)

    async def consume(chunks: Any) -> None:
        async for _ in chunks:
            pass

    async def asynchronously() -> None:
        before = traces(pool)
        for call in (
            lambda: pool.async_generate(**bad),
            lambda: pool.async_generate_all(**bad),
            lambda: consume(pool.async_stream(**bad)),
            lambda: consume(pool.async_as_completed(**bad)),
        ):
            with pytest.raises(InvalidRequest, match="prompt 1: token id -1"):
                await call()
        with pytest.raises(InvalidRequest, match="messages"):
            await pool.async_chat([])
        assert traces(pool) == before

    anyio.run(asynchronously)


def test_engine_refuses(pool: EnginePool) -> None:
    """`generate` of one engine has the same checks."""
    engine = pool.engines[0]
    refused(pool, lambda: engine.generate(input_ids=[65, -1], sampling_params={}), "-1", prompt=0)
    refused(
        pool,
        lambda: engine.generate(input_ids=[IDS], sampling_params={"temprature": 1}),
        "did you mean temperature?",
        prompt=None,
    )


@pytest.mark.parametrize("arguments", [{"mode": "soon"}, {"mode": None}])
def test_pause_mode(pool: EnginePool, arguments: dict[str, Any]) -> None:
    """An unknown mode is refused with the known ones, and nothing is paused."""
    refused(pool, lambda: pool.pause_generation(**arguments), "retract, in_place, abort",
            prompt=None)  # fmt: skip
    assert {engine["state"] for engine in pool.stats()["engines"]} == {"serving"}


def test_abort_arguments(pool: EnginePool) -> None:
    """Aborting needs an id or `abort_all`, and not both."""
    refused(pool, lambda: pool.abort_request(), "rid", "abort_all", prompt=None)
    refused(pool, lambda: pool.abort_request("a", abort_all=True), "rid", "abort_all", prompt=None)


def test_next_call_is_right(pool: EnginePool, right: Callable[[], None]) -> None:
    """After a refused call the same pool gives its earlier answer."""
    for bad in ({"input_ids": [[-1]]}, {"input_ids": [IDS], "sampling_params": {"n": 0}}):
        with pytest.raises(InvalidRequest):
            pool.generate_all(**bad)
        right()


def test_accepted(pool: EnginePool) -> None:
    """Arrays of one or many prompts' ids, no prompts at all, tuples, and parameters that
    upstream ignores, with their neutral values."""
    one = pool.generate_all(input_ids=[IDS], sampling_params=GREEDY)[0]["output_ids"]
    for ids in (np.array(IDS), np.array([IDS]), tuple(IDS), [np.array(IDS, np.int32)]):
        results = pool.generate_all(input_ids=ids, sampling_params=GREEDY)
        assert [result["output_ids"] for result in results] == [one]
    assert pool.generate_all([]) == []
    assert pool.generate_all(input_ids=[]) == []
    neutral = {**GREEDY, "repetition_penalty": 1.0, "logit_bias": None, "sampling_seed": None}
    assert pool.generate(input_ids=IDS, sampling_params=neutral)["output_ids"] == one


def room_of(pool: EnginePool, prompt: list[int]) -> int:
    """The room that the error about a too long output names."""
    with pytest.raises(InvalidRequest, match=r"ask for at most \d+") as caught:
        pool.generate(input_ids=prompt, sampling_params={"max_new_tokens": 100_000})
    return int(str(caught.value).split("ask for at most ")[1].split()[0])


@pytest.mark.parametrize("index", [-1, 4, True, 1.0, "0"])
def test_engines_that_do_not_exist(pool: EnginePool, index: Any) -> None:
    """A front end of such an engine is refused. Its requests would wait for ever."""
    word = f"engine_index={index!r}"
    refused(pool, lambda: pool.front_end(index), word, "from 0 to 3", prompt=None)


def test_room_is_exact(make_pool: MakePool, pool: EnginePool) -> None:
    """The room that an error names is right to the last token, whether the limit is the context
    or an engine's KV cache. One token more is refused."""
    tight = make_pool("qwen3", 1, max_total_tokens=128, warmup="none")
    for tried, ids in ((pool, [65] * 400), (tight, [65] * 90)):
        room = room_of(tried, ids)
        assert 0 < room < 512
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": room}
        result = tried.generate(input_ids=ids, sampling_params=params)
        assert result["meta_info"]["completion_tokens"] == room
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": room}
        one_more = {**params, "max_new_tokens": room + 1}
        refused(
            tried,
            lambda tried=tried, ids=ids, params=one_more: tried.generate(
                input_ids=ids, sampling_params=params
            ),
            f"room for {room}",
            "max_total_tokens=",
            prompt=0,
        )
    refused(tight, lambda: tight.generate(input_ids=[65] * 200), "max_total_tokens=128", prompt=0)
