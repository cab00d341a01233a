"""Outputs with an adapter resume from their tokens, also under another version."""

from functools import partial
from typing import Any

import pytest

from enginepool import EnginePool, InvalidRequest, rl
from tests.lora.conftest import World
from tests.lora.test_exact import GREEDY, NAMES, PROMPTS, load
from tests.lora.test_updates import LONG, ask, check_spans
from tests.support.liveness import (
    all_hang,
    at_rest,
    callers,
    hanging_in_steps,
    has_jobs,
    let_go,
    until,
)
from tests.support.pools import same

X: list[str | None] = [name and "x" for name in NAMES]


def go_on(
    pool: EnginePool, tokens: int, parts: Any = None, lora_path: Any = X
) -> list[dict[str, Any]]:
    return pool.generate_all(
        input_ids=PROMPTS,
        sampling_params=GREEDY | {"max_new_tokens": tokens},
        lora_path=lora_path,
        return_logprob=True,
        partial_outputs=parts,
    )


def spans(results: list[dict[str, Any]]) -> list[Any]:
    return [result["meta_info"].get("lora_versions") for result in results]


def test_as_if_in_one_go(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a", "b")
    whole = go_on(adapted, 12, lora_path=NAMES)
    got = go_on(adapted, 12, go_on(adapted, 5, lora_path=NAMES), NAMES)
    same(got, whole)
    assert spans(got) == spans(whole)


@pytest.mark.parametrize("unloaded", [False, True])
def test_under_another_version(unloaded: bool, adapted: EnginePool, world: World) -> None:
    """Earlier tokens keep the old version. The KV cache of all tokens is the new version's."""
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    parts = go_on(adapted, 7)
    if unloaded:
        adapted.unload_lora_adapter("x")
        with pytest.raises(InvalidRequest, match="no such adapter"):
            go_on(adapted, 12, parts)
        until(lambda: at_rest(adapted))
    adapted.load_lora_adapter("x", world.folders["b"], weight_version=2)
    results = go_on(adapted, 12, parts)
    assert spans(results) == [name and [[0, 7, 1], [7, 12, 2]] for name in X]
    assert [r["output_ids"][:7] for r in results] == [p["output_ids"] for p in parts]
    check_spans(world, {1: "a", 2: "b"}, PROMPTS, results)


def test_the_version_that_the_pool_has_is_replayed(adapted: EnginePool, world: World) -> None:
    """Tokens of another version are fed in."""
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    parts = go_on(adapted, 7)
    adapted.load_lora_adapter("x", world.folders["b"], weight_version=2)
    results = go_on(adapted, 12, parts)
    base = results[0]["meta_info"]["weight_version"]
    again = partial(
        rl.replay, adapted, results, PROMPTS, GREEDY | {"max_new_tokens": 12}, version=base
    )
    for label, folder, tokens in ((2, "b", 5), (1, "a", 7)):
        adapted.load_lora_adapter("x", world.folders[folder], weight_version=label)
        made = again()
        assert made.same
        assert made.tokens == sum(tokens if name else 12 for name in X)
        assert made.logprob < 1e-4


def test_under_other_adapters_and_the_base(adapted: EnginePool, world: World) -> None:
    """Spans say which tokens an adapter made. Tokens of the base have none."""
    for version, name in enumerate("ab", 1):
        adapted.load_lora_adapter(name, world.folders[name], weight_version=version)
    parts = go_on(adapted, 4, lora_path="a")
    parts = go_on(adapted, 7, parts, lora_path=None)
    assert spans(parts) == [[[0, 4, 1]]] * len(PROMPTS)
    assert {part["meta_info"]["lora_path"] for part in parts} == {None}
    results = go_on(adapted, 10, go_on(adapted, 9, parts, "a"), "b")
    assert spans(results) == [[[0, 4, 1], [7, 9, 1], [9, 10, 2]]] * len(PROMPTS)
    for result in results:
        result["meta_info"]["lora_versions"].insert(1, [4, 7, None])
    check_spans(world, {1: "a", 2: "b"}, PROMPTS, results)


@pytest.mark.parametrize("between", ["drain", "in_place", "unload"])
def test_retracted_requests(between: Any, adapted: EnginePool, world: World) -> None:
    """They wait with tokens of the earlier version while it is replaced or unloaded."""
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    with callers() as threads:
        with hanging_in_steps(adapted, at=8) as hangs:
            call = ask(adapted, threads)
            until(lambda: all_hang(hangs))
            pausing = threads.submit(adapted.pause_generation, "retract")
            until(lambda: has_jobs(adapted))
            let_go(hangs)
            pausing.result()
        try:
            if between == "unload":
                adapted.unload_lora_adapter("x")
            else:
                new = world.folders["b"]
                adapted.load_lora_adapter("x", new, weight_version=2, mode=between)
        finally:
            adapted.continue_generation()
        results = call.result()
    check_spans(world, {1: "a", 2: "b"}, PROMPTS, results)
    found = [[version for *_, version in each] for each in spans(results) if each]
    begun = [1, 2] if between == "in_place" else [1]
    assert begun in found
    assert all(each in (begun, [2]) for each in found)  # [2]: without a token before
    assert {len(result["output_ids"]) for result in results} == {LONG["max_new_tokens"]}
