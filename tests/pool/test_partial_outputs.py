"""A part of a larger batch, and outputs that resume from a part, give what an uninterrupted run
gives."""

import random
from typing import Any

import pytest

from enginepool import EnginePool, InvalidRequest
from tests.support.liveness import idle, paused, until
from tests.support.pools import same

PROMPTS = [[3 + i, 40 + i, 7] * (1 + i % 3) for i in range(8)]
# Parameters that an output depends on besides its prompt.
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "sampling_seed": 7},
    "penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "min_new_tokens": {"temperature": 1.0, "sampling_seed": 3, "min_new_tokens": 8},
}


def whole(pool: EnginePool, params: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    ids = options.pop("input_ids", PROMPTS)
    return pool.generate_all(input_ids=ids, sampling_params=params, return_logprob=True, **options)


def cut(result: dict[str, Any], length: int) -> dict[str, Any]:
    """A result as it was after this many tokens."""
    meta = result["meta_info"]
    return {
        "output_ids": result["output_ids"][:length],
        "meta_info": {
            name: meta[name][:length]
            for name in ("output_token_logprobs", "output_top_logprobs")
            if name in meta
        },
    }


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_gives_the_same_however_it_is_split(pool: EnginePool, n: int) -> None:
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 10, "n": n}
    expected = whole(pool, params)
    order = random.Random(0).sample(range(len(PROMPTS)), len(PROMPTS))
    for part in (order[:3], order[3:]):
        got = whole(pool, params, input_ids=[PROMPTS[i] for i in part], prompt_indices=part)
        same(got, [r for i in part for r in expected[i * n : (i + 1) * n]])
        assert [r["meta_info"]["prompt_index"] for r in got] == [i for i in part for _ in range(n)]


def test_samples_by_themselves_are_those_of_their_prompt(pool: EnginePool) -> None:
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 10}
    expected = whole(pool, params | {"n": 3})
    wanted = [(5, 2), (0, 1), (5, 0)]
    got = whole(
        pool,
        params,
        input_ids=[PROMPTS[i] for i, _ in wanted],
        prompt_indices=[i for i, _ in wanted],
        sample_indices=[k for _, k in wanted],
    )
    same(got, [expected[3 * i + k] for i, k in wanted])
    assert [(r["meta_info"]["prompt_index"], r["meta_info"]["sample_index"]) for r in got] == wanted


@pytest.mark.parametrize("rule", RULES)
def test_an_output_goes_on_as_if_it_had_run_in_one_go(pool: EnginePool, rule: str) -> None:
    params = RULES[rule] | {"max_new_tokens": 12}
    expected = whole(pool, params)
    lengths = [0, 1, 5, 11, 12, 7, 2, 3]
    parts = [
        cut(result, length) if length else None
        for result, length in zip(expected, lengths, strict=True)
    ]
    got = whole(pool, params, partial_outputs=parts)
    same(got, expected)
    for one, other in zip(got, expected, strict=True):
        assert one["text"] == other["text"]
        for name in ("prompt_tokens", "completion_tokens"):
            assert one["meta_info"][name] == other["meta_info"][name]
        assert one["meta_info"]["cached_tokens"] <= one["meta_info"]["prompt_tokens"]


def test_a_stopped_part_stays_as_it_is(pool: EnginePool) -> None:
    free = whole(pool, {"temperature": 0.0, "max_new_tokens": 12})
    end = free[0]["output_ids"][4]
    params = {"temperature": 0.0, "max_new_tokens": 12, "stop_token_ids": [end]}
    expected = whole(pool, params)
    at = len(expected[0]["output_ids"])
    assert expected[0]["meta_info"]["finish_reason"]["type"] == "stop"
    for length in (at - 1, at):
        parts = [cut(expected[0], length), *[None] * 7]
        same(whole(pool, params, partial_outputs=parts), expected)


def test_a_stop_string_may_begin_in_the_part(pool: EnginePool) -> None:
    free = whole(pool, {"temperature": 0.0, "max_new_tokens": 24})
    middles = [r["text"][len(r["text"]) // 2 :][:3] for r in free]
    params = {"temperature": 0.0, "max_new_tokens": 24, "stop": [m for m in middles if m]}
    expected = whole(pool, params)
    stopped = [r for r in expected if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert any(len(r["output_ids"]) > 1 for r in stopped)
    parts = [cut(result, len(result["output_ids"]) - 1) for result in expected]
    got = whole(pool, params, partial_outputs=parts)
    same(got, expected)
    assert [r["text"] for r in got] == [r["text"] for r in expected]


def test_a_grammar_goes_on_where_it_was(pool: EnginePool) -> None:
    params = {"temperature": 1.0, "sampling_seed": 5, "regex": "[a-z]{4,9}", "max_new_tokens": 40}
    expected = whole(pool, params)
    parts = [cut(result, i % 4) for i, result in enumerate(expected)]
    same(whole(pool, params, partial_outputs=parts), expected)


def test_the_most_probable_tokens_of_all_of_it(pool: EnginePool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 6}
    expected = whole(pool, params, top_logprobs_num=2)
    parts = [cut(result, 3) for result in expected]
    got = whole(pool, params, top_logprobs_num=2, partial_outputs=parts)
    for one, other in zip(got, expected, strict=True):
        a, b = (r["meta_info"]["output_top_logprobs"] for r in (one, other))
        assert [[e[1] for e in row] for row in a] == [[e[1] for e in row] for row in b]


def test_complete_outputs_take_no_step_and_are_not_counted_again(pool: EnginePool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 6}
    expected = whole(pool, params)
    until(lambda: idle(pool))
    before = pool.stats()
    got = whole(pool, params, partial_outputs=[cut(result, 6) for result in expected])
    after = pool.stats()
    same(got, expected)
    assert after["finished"] == before["finished"] + len(PROMPTS)
    assert after["completion_tokens"] == before["completion_tokens"]
    steps = [[e["steps"] for e in stats["engines"]] for stats in (before, after)]
    assert steps[0] == steps[1]


def test_the_spans_of_versions_go_on(pool: EnginePool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 6}
    expected = whole(pool, params)
    version = expected[0]["meta_info"]["weight_version"]
    known, unknown, same_version = (cut(expected[i], 3) for i in range(3))
    known["meta_info"] |= {
        "weight_versions": [[0, 3, "elsewhere"]],
        "prompt_weight_versions": ["elsewhere"],
    }
    same_version["meta_info"]["weight_versions"] = [[0, 3, version]]
    got = whole(pool, params, input_ids=PROMPTS[:3], partial_outputs=[known, unknown, same_version])
    assert [r["meta_info"]["weight_versions"] for r in got] == [
        [[0, 3, "elsewhere"], [3, 6, version]],
        [[3, 6, version]],
        [[0, 6, version]],
    ]
    assert got[0]["meta_info"]["prompt_weight_versions"] == ["elsewhere"]


def test_a_stream_continues_after_the_part(pool: EnginePool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 8}
    (expected,) = whole(pool, params, input_ids=PROMPTS[:1])
    chunks = list(
        pool.stream(
            input_ids=PROMPTS[0], sampling_params=params, partial_outputs=[cut(expected, 5)]
        )
    )
    assert all(len(chunk["output_ids"]) > 5 for chunk in chunks)
    assert chunks[-1]["output_ids"] == expected["output_ids"]


def test_without_log_probabilities_where_nobody_wants_them(pool: EnginePool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 8}
    (expected,) = whole(pool, params, input_ids=PROMPTS[:1])
    bare = {"output_ids": expected["output_ids"][:4]}
    result = pool.generate(input_ids=PROMPTS[0], sampling_params=params, partial_outputs=[bare])
    assert isinstance(result, dict)
    assert result["output_ids"] == expected["output_ids"]


def partial(ids: Any = (5, 6), **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_indices": [1]}, "prompt_indices has 1 entries for 2 prompts"),
        ({"prompt_indices": [0, -1]}, "prompt 1: prompt_indices: -1: expected an integer"),
        ({"sample_indices": 3}, "sample_indices: expected a list"),
        (
            {"sample_indices": [0, 1], "n": 2},
            "prompt 0: sample_indices with n=2: repeat the prompt",
        ),
        ({"partial_outputs": [None, partial()], "n": 2}, "partial_outputs with n=2"),
        ({"partial_outputs": [None, 7]}, "prompt 1: partial_outputs: 7: expected a dict"),
        ({"partial_outputs": [None, partial("ab")]}, "prompt 1: .*expected a list of token ids"),
        ({"partial_outputs": [None, partial([5, -1])]}, "prompt 1: token id -1 is outside"),
        ({"partial_outputs": [partial([5] * 9), None]}, "9 tokens, and at most 8 are allowed"),
        (
            {"partial_outputs": [partial(), None], "return_logprob": True},
            "None: expected one entry for each of 2 output_ids, because of return_logprob=True",
        ),
        (
            {"partial_outputs": [partial(output_token_logprobs=[-1.0]), None]},
            "output_token_logprobs: 1: expected one entry for each of 2 output_ids",
        ),
        (
            {"partial_outputs": [partial(output_token_logprobs=[(-1.0, 9, None), -2.0]), None]},
            r"expected \(logprob, 5, None\)",
        ),
        (
            {"partial_outputs": [partial(output_token_logprobs=[-1.0, float("nan")]), None]},
            "nan: expected",
        ),
        (
            {"partial_outputs": [partial(weight_versions=[[0, 1, "a"]]), None]},
            r"expected spans \[start, end, version\] that end at 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(pool: EnginePool, options: dict[str, Any], said: str) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 8, "n": options.pop("n", 1)}
    before = pool.stats()["finished"]
    with pytest.raises(InvalidRequest, match=said):
        pool.generate_all(input_ids=PROMPTS[:2], sampling_params=params, **options)
    assert pool.stats()["finished"] == before


HUGE = 10**400
TOP, NAMED, MASK = "top_logprobs_num", "token_ids_logprob", "return_sampling_mask"


def mask(ids: Any) -> dict[str, Any]:
    rows = {"indptr": [0, 1, 2], "ids": ids, "too_many": []}
    return {"output_sampling_mask": rows, "output_token_sampling_logprobs": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("meta", "options"),
    [
        ({"output_token_logprobs": [(), -2.0]}, {"return_logprob": True}),
        ({"output_token_logprobs": [HUGE, -2.0]}, {"return_logprob": True}),
        ({"output_top_logprobs": [None, None]}, {TOP: 1}),
        ({"output_top_logprobs": [[(-1.0,)], [(-1.0, 5)]]}, {TOP: 1}),
        ({"output_top_logprobs": [[("a", 5)], [(-1.0, 5)]]}, {TOP: 1}),
        ({"output_top_logprobs": [[(-1.0, 5)], [(-1.0, None)]]}, {}),
        ({"output_top_logprobs": [[(HUGE, 5)], [(-1.0, 5)]]}, {}),
        ({"output_token_ids_logprobs": [[(HUGE, 7)], [(-1.0, 7)]]}, {NAMED: [7]}),
        ({"output_token_ids_logprobs": [None, [(-1.0, 7)]]}, {NAMED: [7]}),
        (mask([5, 2**40]), {MASK: True}),
        (mask(None), {MASK: True}),
        ({"weight_versions": [["0", "2", "a"]]}, {}),
        ({"weight_versions": [[-1, 2, "a"]]}, {}),
        ({"weight_versions": [[0, 2.0, "a"]]}, {}),
        ({"weight_versions": [[0, 2, ["a"]]]}, {}),
        ({"lora_versions": [[0, 2, None]]}, {}),
        ({"prompt_weight_versions": 7}, {}),
        ({"prompt_weight_versions": "new"}, {}),
        ({"prompt_weight_versions": ["a", None]}, {}),
    ],
)
def test_a_malformed_field_is_named(
    pool: EnginePool, meta: dict[str, Any], options: dict[str, Any]
) -> None:
    field, *_ = meta
    if {TOP, NAMED} & options.keys():
        options = options | {"return_logprob": True}
        meta = {"output_token_logprobs": [-1.0, -2.0]} | meta
    with pytest.raises(InvalidRequest, match=f"prompt 1: partial_outputs: .*{field}"):
        pool.generate_all(input_ids=PROMPTS[:2], partial_outputs=[None, partial(**meta)], **options)


def test_a_partial_output_that_no_engine_continued(pool: EnginePool) -> None:
    """Its prompt is not counted, because no engine has computed it."""
    params = {"temperature": 0.0, "max_new_tokens": 8}
    parts = [cut(whole(pool, params, input_ids=PROMPTS[:1])[0], 5)]
    before = pool.stats()["prompt_tokens"]
    with paused(pool):
        (result,) = whole(pool, params, input_ids=PROMPTS[:1], partial_outputs=parts, timeout=0.1)
    assert result["meta_info"]["finish_reason"]["err_type"] == "timeout"
    assert result["output_ids"] == parts[0]["output_ids"]
    assert pool.stats()["prompt_tokens"] == before
