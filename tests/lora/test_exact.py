"""An output with an adapter is that of the merged weights."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patches
from enginepool import EnginePool, InvalidRequest, rl
from tests.lora.conftest import LORA, TOKENS, World, make_world
from tests.support import faults
from tests.support.adapters import ALL, agrees, config, ids_of, merged, random_adapter
from tests.support.liveness import until
from tests.support.marks import slow, steady_decode
from tests.support.pools import SMALL
from tests.support.reference import reference_greedy_batch
from tests.support.steady import counted

GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
PROMPTS = ids_of(0, [5, 20, 100, 7, 9, 33])  # the third is prefilled in chunks
NAMES = ["a", None, "b", "b", "a", None]


def load(pool: EnginePool, world: World, *names: str) -> None:
    for name in names:
        pool.load_lora_adapter(name, world.folders[name])


def check(world: World, prompts: Any, names: Any, results: list[dict[str, Any]]) -> None:
    for prompt, name, result in zip(prompts, names, results, strict=True):
        (expected,) = world.expected(name, [prompt], len(result["output_ids"]))
        assert agrees(result, expected), (name, result["output_ids"], expected.ids)


@pytest.mark.parametrize("family", slow("qwen2", "llama"))
def test_families(family: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    world = make_world(model_dir(family), tmp_path)
    with EnginePool(str(world.model), devices=1, **LORA, **SMALL) as pool:
        load(pool, world, "a", "b")
        results = pool.generate_all(
            input_ids=PROMPTS, sampling_params=GREEDY, lora_path=NAMES, return_logprob=True
        )
    check(world, PROMPTS, NAMES, results)


@steady_decode
def test_a_prefill_is_one_transfer_and_one_launch(adapted: EnginePool, world: World) -> None:
    """Whichever adapters its prompts have."""
    load(adapted, world, "a", "b")
    scheduler = faults.scheduler_of(adapted, 0)
    engine: Any = adapted.engines[0]
    places = [(scheduler.steady.program.sender, "place"), (scheduler.prefill_program, "launch")]
    with counted(places) as counts:
        engine.generate(
            input_ids=[[5, 6], [7], [8, 9]],
            sampling_params=GREEDY | {"max_new_tokens": 1},
            lora_path=["a", None, "b"],
        )
    assert counts == [1, 1]


def test_mixed_batch(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a", "b")
    before = adapted.stats()["engines"][0]["fallback_steps"]
    results = adapted.generate_all(
        input_ids=PROMPTS, sampling_params=GREEDY, lora_path=NAMES, return_logprob=True
    )
    check(world, PROMPTS, NAMES, results)
    upstreams = adapted.stats()["engines"][0]["fallback_steps"] > before
    assert upstreams is not patches.optimising()
    for name, result in zip(NAMES, results, strict=True):
        meta = result["meta_info"]
        assert meta.get("lora_path") == name
        version = adapted.stats()["lora_adapters"][name]["weight_version"] if name else None
        assert meta.get("lora_versions") == (name and [[0, TOKENS, version]])
        assert meta["weight_versions"] == [[0, TOKENS, 0]]


def test_one_engine(adapted: EnginePool, world: World) -> None:
    """Upstream's own call of one engine takes adapters."""
    load(adapted, world, "a", "b")
    engine: Any = adapted.engines[1]
    results = engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, lora_path=NAMES, return_logprob=True
    )
    check(world, PROMPTS, NAMES, results)


def test_score(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a", "b")
    after = [world.expected(name, [p])[0] for name, p in zip(NAMES, PROMPTS, strict=True)]
    scores: Any = adapted.score(
        input_ids=PROMPTS, continuation_ids=[one.ids for one in after], lora_path=NAMES
    )
    for name, score, expected in zip(NAMES, scores, after, strict=True):
        assert score["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
        assert score["meta_info"].get("lora_path") == name
    prompts = adapted.generate_all(
        input_ids=[PROMPTS[0]] * 2,
        sampling_params={"max_new_tokens": 0},
        lora_path=["a", None],
        return_prompt_logprob=True,
    )
    mine, base = ([e[0] for e in r["meta_info"]["input_token_logprobs"][1:]] for r in prompts)
    assert mine != pytest.approx(base, abs=1e-2)


def test_prefix_cache_is_separated(adapted: EnginePool, world: World) -> None:
    prompt = ids_of(3, [60])[0]
    load(adapted, world, "a", "b")
    for name in ("a", None, "b", "a", None):
        (result,) = adapted.generate_all(
            input_ids=[prompt], sampling_params=GREEDY, lora_path=name, return_logprob=True
        )
        check(world, [prompt], [name], [result])


def test_grammar(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a")
    params = GREEDY | {"regex": "[0-9]{4}", "ignore_eos": False}
    mine, base = adapted.generate_all(
        input_ids=[PROMPTS[1]] * 2, sampling_params=params, lora_path=["a", None]
    )
    assert re.fullmatch("[0-9]{4}", mine["text"])
    assert re.fullmatch("[0-9]{4}", base["text"])


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        (config(4, 2), 0.5),
        (config(4, 8, use_rslora=True), 4.0),
        (config(4, 8, alpha_pattern={"q_proj": 2}), {"q_proj": 0.5}),
    ],
)
def test_scale(fields: Any, scale: Any, adapted: EnginePool, world: World, tmp_path: Path) -> None:
    by = scale if isinstance(scale, float) else {**dict.fromkeys(ALL, 2.0), **scale}
    adapted.load_lora_adapter("scaled", world.arrays["a"], config_dict=fields)
    reference = merged(tmp_path / "merged", world.model, world.arrays["a"], by)
    results = adapted.generate_all(
        input_ids=PROMPTS[:2], sampling_params=GREEDY, lora_path="scaled", return_logprob=True
    )
    expected = reference_greedy_batch(reference, PROMPTS[:2], TOKENS)
    assert all(map(agrees, results, expected))


def test_only_some_layers(adapted: EnginePool, world: World, tmp_path: Path) -> None:
    """A slot keeps nothing of an earlier adapter that changed all layers."""
    load(adapted, world, "a", "b")
    adapted.generate_all(input_ids=PROMPTS[:2], sampling_params=GREEDY, lora_path=["a", "b"])
    arrays = random_adapter(world.model, 9, rank=2, targets=["v_proj"], std=0.4)
    adapted.unload_lora_adapter("a")
    adapted.unload_lora_adapter("b")
    adapted.load_lora_adapter("values", arrays, config_dict=config(2))
    reference = merged(tmp_path / "merged", world.model, arrays, 4.0)
    results = adapted.generate_all(
        input_ids=PROMPTS, sampling_params=GREEDY, lora_path="values", return_logprob=True
    )
    expected = [reference_greedy_batch(reference, [p], TOKENS)[0] for p in PROMPTS]
    assert all(map(agrees, results, expected))


def test_new_base_keeps_adapters(
    adapted: EnginePool, world: World, target: Callable[[str], Path], tmp_path: Path
) -> None:
    load(adapted, world, "a")
    try:
        adapted.update_weights(target("qwen3"))
        reference = merged(tmp_path / "merged", target("qwen3"), world.arrays["a"], 2.0)
        results = adapted.generate_all(
            input_ids=PROMPTS[:3],
            sampling_params=GREEDY,
            lora_path=["a", None, "a"],
            return_logprob=True,
        )
    finally:
        adapted.update_weights(world.model, weight_version=0)
    places = [reference, target("qwen3"), reference]
    for prompt, place, result in zip(PROMPTS, places, results, strict=False):
        assert agrees(result, reference_greedy_batch(place, [prompt], TOKENS)[0])


@pytest.mark.parametrize("rebuilt", [False, True])
def test_fault(rebuilt: bool, adapted: EnginePool, world: World) -> None:
    """The engine's requests continue with their adapters, on the other engine and on this one."""
    load(adapted, world, "a", "b")
    error = RuntimeError("RESOURCE_EXHAUSTED: gone") if rebuilt else None
    faults.raise_in_step(adapted, 0, at=5, error=error)
    results = adapted.generate_all(
        input_ids=PROMPTS, sampling_params=GREEDY, lora_path=NAMES, return_logprob=True
    )
    check(world, PROMPTS, NAMES, results)
    until(lambda: all(e["state"] == "serving" for e in adapted.stats()["engines"]))
    prompts, names = PROMPTS * 4, NAMES * 4  # enough that both engines get some on a busy machine
    results = adapted.generate_all(
        input_ids=prompts, sampling_params=GREEDY, lora_path=names, return_logprob=True
    )
    check(world, prompts, names, results)
    assert {r["meta_info"]["engine_index"] for r in results} == {0, 1}


def test_names_that_are_not_loaded(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a")
    for name in ("b", 7, ["a", "a"]):
        with pytest.raises(InvalidRequest, match="lora_path"):
            adapted.generate_all(input_ids=[PROMPTS[0]], lora_path=name)  # type: ignore[arg-type]
    adapted.unload_lora_adapter("a")
    with pytest.raises(InvalidRequest, match="no such adapter"):
        adapted.generate(input_ids=PROMPTS[0], lora_path="a")
    with pytest.raises(InvalidRequest, match="no such adapter"):
        adapted.unload_lora_adapter("a")


def test_a_record_is_replayed(adapted: EnginePool, world: World) -> None:
    """With the adapters that its results name."""
    load(adapted, world, "a", "b")
    params = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    results = adapted.generate_all(
        input_ids=PROMPTS, sampling_params=params, lora_path=NAMES, return_logprob=True
    )
    version = results[0]["meta_info"]["weight_version"]
    again = rl.replay(adapted, results, PROMPTS, params, version=version)
    assert again.same
    assert again.tokens == TOKENS * len(PROMPTS)


def test_a_record_of_two_versions_of_an_adapter(adapted: EnginePool, world: World) -> None:
    """The tokens of the version that the pool has are replayed. Those before them are fed in."""
    params = {"temperature": 1.0, "sampling_seed": 7, "ignore_eos": True, "max_new_tokens": 20}
    asked: dict[str, Any] = {"input_ids": PROMPTS, "lora_path": "x", "return_logprob": True}
    results = None
    for version, folder in ((1, "a"), (2, "b")):
        adapted.load_lora_adapter("x", world.folders[folder], weight_version=version)
        params["max_new_tokens"] = 20 * version
        results = adapted.generate_all(None, params, partial_outputs=results, **asked)
    assert results is not None
    spans = [result["meta_info"]["lora_versions"] for result in results]
    assert spans == [[[0, 20, 1], [20, 40, 2]]] * len(PROMPTS)
    again = rl.replay(adapted, results, PROMPTS, params, version=0)
    assert again.same
    assert again.tokens == 20 * len(PROMPTS)
