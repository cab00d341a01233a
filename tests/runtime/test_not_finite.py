"""Numbers that are not finite end only the requests that cause them, whatever shares a batch
with them, and however many there are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.forced import assert_greedy
from tests.support.liveness import SECONDS, at_rest, callers, until
from tests.support.marks import slow
from tests.support.not_finite import BAD_TOKENS, SPOKEN, not_finite, write_spoiled
from tests.support.pools import NATIVE_PAGES, SMALL
from tests.support.scores import assert_prompt_logprobs, assert_scores

GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
GOOD = [[65 + i, 90 - i % 30, 40 + i, *range(50, 50 + i % 7)] for i in range(40)]
BAD = [[70, token, 71] for token in BAD_TOKENS]


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spoiled(tmp_path_factory.mktemp("spoiled"))


@pytest.fixture(scope="module", params=[16 if NATIVE_PAGES else 1, *slow(1, 128)])
def pool(spoiled: Path, request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    """Engines that may fail only once, so failures of requests must not count for them."""
    options = SMALL | {"max_running_requests": 8, "precompile_bs_paddings": [8], "warmup": "none"}
    if request.param == 128:
        options |= dict.fromkeys(("max_prefill_tokens", "chunked_prefill_size"), 128)
        options |= {"precompile_token_paddings": [128], "max_total_tokens": 2048}
    options |= {"page_size": request.param, "max_restarts": 1}
    with EnginePool(str(spoiled), devices=2, **options) as pool:
        yield pool


@pytest.fixture(autouse=True)
def serves(pool: EnginePool) -> Iterator[None]:
    pool.flush_cache()
    engines = pool.engines
    yield
    until(lambda: [e["state"] for e in pool.stats()["engines"]] == ["serving"] * 2)
    until(lambda: at_rest(pool))
    assert pool.engines == engines


def ask(pool: EnginePool, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    return pool.generate_all(None, GREEDY, input_ids=prompts, return_logprob=True, **options)


def assert_good(model: Path, results: list[dict[str, Any]], prompts: list[list[int]]) -> None:
    """Each result is whole, or ends at the token after which nothing is finite. Every id is
    right."""
    for result in results:
        ids = result["output_ids"]
        assert ids.index(SPOKEN) == len(ids) - 1 if not_finite(result) else len(ids) == 24
    assert assert_greedy(model, prompts, [without_spoken(result) for result in results])


def without_spoken(result: dict[str, Any]) -> dict[str, Any]:
    """The reference has nothing finite either after a last id that is bad."""
    meta, ids = result["meta_info"], result["output_ids"]
    keep = len(ids) - (ids[-1] == SPOKEN)
    values = meta["output_token_logprobs"][:keep]
    meta = meta | {"output_token_logprobs": values, "completion_tokens": keep}
    return result | {"output_ids": ids[:keep], "meta_info": meta}


@pytest.mark.parametrize("bad", [1, 3])
def test_bad_prompts_among_good_ones(pool: EnginePool, spoiled: Path, bad: int) -> None:
    """Bad prompts end without an output, and no others do. An output that comes to a bad token
    ends with it. The engines keep serving with their weights."""
    results = ask(pool, [*GOOD[:7], *BAD[:bad], *GOOD[7:]])
    ended = [results.pop(7) for _ in range(bad)]
    assert all(not_finite(result) and not result["output_ids"] for result in ended)
    assert_good(spoiled, results, GOOD)
    kinds = {e["by"] for e in pool.events() if e["event"] == "engine_recovered"}
    assert kinds == {"reset"}


def test_the_first_that_new_weights_are_asked(pool: EnginePool, spoiled: Path) -> None:
    """A prompt is bad on every engine, before any engine has shown that its weights are right.
    Good prompts beside it and other bad ones do not end."""
    pool.update_weights(spoiled, weight_version="anew")
    assert not_finite(ask(pool, BAD[:1])[0])
    results = ask(pool, [*GOOD[:5], *BAD, *GOOD[5:12]])
    assert all(not_finite(results.pop(5)) for _ in BAD)
    assert_good(spoiled, results, GOOD[:12])


def test_samples_and_streams_of_a_bad_prompt(pool: EnginePool, spoiled: Path) -> None:
    """Each sample and each stream ends by itself, whatever runs beside it."""
    several = {"n": 3} | GREEDY | {"temperature": 1.0}
    with callers(3) as executor:
        good = executor.submit(ask, pool, GOOD[:10])
        samples = executor.submit(
            pool.generate_all, None, several, input_ids=[BAD[1], GOOD[10]], return_logprob=True
        )
        chunks = list(pool.stream(None, GREEDY, input_ids=[BAD[0], GOOD[11]]))
        last = {chunk["meta_info"]["prompt_index"]: chunk for chunk in chunks}
        assert not_finite(last[0])
        assert len(last[1]["output_ids"]) == 24 or not_finite(last[1])
        bad, other = samples.result(SECONDS)[:3], samples.result(SECONDS)[3:]
        assert all(not_finite(result) and not result["output_ids"] for result in bad)
        assert all(result["output_ids"] for result in other)
        assert_good(spoiled, good.result(SECONDS), GOOD[:10])


@pytest.mark.parametrize("asked", [{"frequency_penalty": 0.5}, {"regex": "[a-z]{24}"}])
def test_rows_with_penalties_or_grammars(pool: EnginePool, asked: dict[str, Any]) -> None:
    """These do not hide numbers that are not finite."""
    params = {"temperature": 0.0, "max_new_tokens": 24} | asked
    alone = [pool.generate(None, params, input_ids=prompt) for prompt in GOOD[:6]]
    results = pool.generate_all(None, params, input_ids=[*GOOD[:3], *BAD, *GOOD[3:6]])
    assert all(not_finite(results.pop(3)) for _ in BAD)
    for result, expected in zip(results, alone, strict=True):
        assert result["output_ids"] == expected["output_ids"]
        assert not_finite(result) == not_finite(expected)


def test_a_prefix_that_good_and_bad_prompts_share(pool: EnginePool, spoiled: Path) -> None:
    """The bad part behind the prefix is in no other request's KV cache, whichever prompt comes
    first."""
    prefix = [30 + i % 50 for i in range(45)]
    good = [[*prefix, 100 + i, 60] for i in range(6)]
    bad = [[*prefix, 100 + i, token] for i, token in enumerate(BAD_TOKENS)]
    for _ in range(2):
        results = ask(pool, [*bad, *good])
        assert all(not_finite(results.pop(0)) for _ in bad)
        assert_good(spoiled, results, good)


def test_scores(pool: EnginePool, spoiled: Path) -> None:
    """A bad prompt and a bad continuation have no values. Others have the right ones."""
    prompts, continuations = GOOD[:12], [prompt[:3] for prompt in GOOD[12:24]]
    mixed = [*prompts[:4], BAD[0], GOOD[0], *prompts[4:]]
    results = pool.score(
        input_ids=mixed,
        continuation_ids=[*continuations[:4], [70, 71], [70, BAD[1][1], 71], *continuations[4:]],
    )
    ended = [results.pop(4) for _ in range(2)]
    assert all(not_finite(result) for result in ended)
    for index, result in enumerate(results):
        result["meta_info"]["prompt_index"] = index
    assert_scores(spoiled, prompts, continuations, results)


def test_log_probabilities_of_prompts(pool: EnginePool, spoiled: Path) -> None:
    results = ask(pool, [*GOOD[:4], BAD[0], *GOOD[4:8]], return_prompt_logprob=True)
    assert not_finite(results.pop(4))
    for prompt, result in zip(GOOD[:8], results, strict=True):
        assert_prompt_logprobs(spoiled, prompt, result["meta_info"])
    assert_good(spoiled, results, GOOD[:8])


def test_an_engines_own_calls(pool: EnginePool, spoiled: Path) -> None:
    """They cannot use a second engine, so the request is tried on the same one again, and ends."""
    engine = pool.engines[0]
    assert not_finite(engine.generate(input_ids=BAD[0], sampling_params=GREEDY))
    results = engine.generate(
        input_ids=[*GOOD[:3], BAD[1]], sampling_params=GREEDY, return_logprob=True
    )
    assert not_finite(results.pop())
    for index, result in enumerate(results):
        result["meta_info"]["prompt_index"] = index
    assert_good(spoiled, results, GOOD[:3])
