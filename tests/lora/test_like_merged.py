"""Every kind of request gives with an adapter what the merged weights give."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, WeightUpdateFailed
from tests.lora.conftest import LORA, World, make_world
from tests.lora.test_exact import GREEDY, NAMES, PROMPTS, check, load
from tests.support.adapters import ids_of
from tests.support.faults import Fault
from tests.support.forced import output_logits
from tests.support.liveness import until
from tests.support.pools import NATIVE_PAGES, SMALL, same

PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.7}
SEEDED = {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "sampling_seed": 5}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalties": (GREEDY | PENALTIES, {}),
    "sampled": (GREEDY | SEEDED, {"return_sampling_mask": True}),
    "samples": (GREEDY | SEEDED | {"n": 2}, {"top_logprobs_num": 3}),
    "regex": (GREEDY | {"regex": "([0-9]{3} )*", "ignore_eos": False}, {}),
    "named": (GREEDY | {"min_new_tokens": 4}, {"token_ids_logprob": [5, 60, 200]}),
    "prompt": (GREEDY, {"return_prompt_logprob": True}),
}


def ask(pool: EnginePool, kind: str, **options: Any) -> list[dict[str, Any]]:
    params, more = CALLS[kind]
    return pool.generate_all(
        input_ids=PROMPTS, sampling_params=params, return_logprob=True, **more, **options
    )


@pytest.fixture(scope="module")
def alone(opened: EnginePool, world: World) -> dict[str | None, dict[str, list[Any]]]:
    """By adapter: the results of every call on the merged weights."""
    found: dict[str | None, dict[str, list[Any]]] = {}
    for name in ("a", "b", None):
        opened.update_weights(world.merged[name], weight_version=0)  # the base comes last
        found[name] = {kind: ask(opened, kind) for kind in CALLS}
    return found


@pytest.mark.parametrize("kind", CALLS)
def test_like_merged(
    kind: str, adapted: EnginePool, world: World, alone: dict[str | None, dict[str, list[Any]]]
) -> None:
    """A batch of two adapters and the base gives what a pool of each one's merged weights gives."""
    load(adapted, world, "a", "b")
    mixed = ask(adapted, kind, lora_path=NAMES)
    names = [name for name in NAMES for _ in range(len(mixed) // len(PROMPTS))]
    expected = [alone[name][kind][index] for index, name in enumerate(names)]
    same(mixed, expected)
    for one, other in zip(mixed, expected, strict=True):
        alike(one["meta_info"], other["meta_info"])
    if "regex" in CALLS[kind][0]:
        assert all(re.fullmatch("([0-9]{3} )*[0-9]{0,3}", one["text"]) for one in mixed)


def alike(meta: dict[str, Any], other: dict[str, Any]) -> None:
    assert meta.get("output_sampling_mask") == other.get("output_sampling_mask")
    for entries in ("output_top_logprobs", "output_token_ids_logprobs"):
        for row, want in zip(meta.get(entries, ()), other.get(entries, ()), strict=True):
            assert [entry[1] for entry in row] == [entry[1] for entry in want]
            values = [entry[0] for entry in want]
            assert [entry[0] for entry in row] == pytest.approx(values, abs=1e-4)
    scores = [[e[0] for e in m.get("input_token_logprobs", ())[1:]] for m in (meta, other)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_prefix_cache_is_separated_by_version(adapted: EnginePool, world: World) -> None:
    prompt = ids_of(4, [60])[0]

    def cached(folder: str | None) -> int:
        """How many of the prompt's tokens were cached, after checking the output."""
        name = folder and "x"
        (result,) = adapted.generate_all(
            input_ids=[prompt], sampling_params=GREEDY, lora_path=name, return_logprob=True
        )
        check(world, [prompt], [folder], [result])
        return result["meta_info"]["cached_tokens"]

    adapted.flush_cache()
    for folder in "ab":
        adapted.load_lora_adapter("x", world.folders[folder])
        assert cached(folder) == 0
        until(lambda folder=folder: cached(folder) > 0)  # as soon as the same engine takes it
    assert cached(None) == 0


def raise_fault(*_: Any) -> None:
    raise Fault("the device is gone")


def test_four_engines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more adapters than slots. Then one is replaced and another one is unloaded."""
    names = [*"abcd", None] * 5
    prompts = ids_of(6, [4 + 5 * i % 60 for i in range(len(names))])
    call: dict[str, Any] = {"sampling_params": GREEDY, "return_logprob": True}
    with EnginePool(str(world.model), devices=4, **LORA, **SMALL) as pool:
        load(pool, world, *"abcd")
        results = pool.generate_all(input_ids=prompts, lora_path=names, **call)
        check(world, prompts, names, results)
        assert {r["meta_info"]["engine_index"] for r in results} == {0, 1, 2, 3}
        slots: Any = pool.runtime.workers[2].scheduler.adapters
        with monkeypatch.context() as patch:
            patch.setattr(slots, "_write_slot", raise_fault)  # of one engine, so none gets it
            with pytest.raises(WeightUpdateFailed, match="engine 2"):
                pool.load_lora_adapter("a", world.folders["b"], mode="in_place")
        results = pool.generate_all(input_ids=prompts, lora_path=names, **call)
        check(world, prompts, names, results)
        pool.load_lora_adapter("a", world.folders["b"])
        pool.unload_lora_adapter("c")
        names = ["a", None, "b", "d"] * 6
        results = pool.generate_all(input_ids=prompts[:24], lora_path=names, **call)
        check(world, prompts[:24], ["b" if name == "a" else name for name in names], results)


PAGES: dict[str, Any] = SMALL | {
    "page_size": 128 if NATIVE_PAGES else 1,
    "max_total_tokens": 4096,
    "max_prefill_tokens": 128,
    "chunked_prefill_size": 128,
    "precompile_token_paddings": [128],
}


@pytest.mark.slow
def test_two_devices_an_engine(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """With pages of 128 tokens: prefixes, chunks, scores."""
    world = make_world(model_dir("larger qwen3"), tmp_path)
    prompts = [*PROMPTS, *ids_of(7, [200, 140])]
    names = [*NAMES, "b", None]
    call: dict[str, Any] = {"sampling_params": GREEDY, "return_logprob": True}
    with EnginePool(str(world.model), devices=2, tp_size=2, **LORA, **PAGES) as pool:
        load(pool, world, "a", "b")
        for _ in range(2):  # the second time from the prefix cache
            results = pool.generate_all(input_ids=prompts, lora_path=names, **call)
            check(world, prompts, names, results)
        pool.load_lora_adapter("b", world.folders["c"], mode="retract")
        results = pool.generate_all(input_ids=prompts, lora_path=names, **call)
        now: Any = ["c" if name == "b" else name for name in names]
        check(world, prompts, now, results)
        after = [world.expected(name, [p])[0] for name, p in zip(now, prompts, strict=True)]
        scores: Any = pool.score(
            input_ids=prompts, continuation_ids=[one.ids for one in after], lora_path=names
        )
        for score, expected in zip(scores, after, strict=True):
            assert score["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.slow
def test_bfloat16(world: World) -> None:
    """Each output is nearly the best one for its merged weights, and not for the base's."""
    options: Any = LORA | SMALL | {"dtype": "bfloat16"}
    with EnginePool(str(world.model), devices=1, **options) as pool:
        load(pool, world, "a", "b")
        slots: Any = pool.runtime.workers[0].leaves.adapter_specs.values()
        assert {str(spec.dtype) for spec in slots} == {"bfloat16"}
        results = pool.generate_all(
            input_ids=PROMPTS, sampling_params=GREEDY, lora_path=NAMES, return_logprob=True
        )
    outputs = [result["output_ids"] for result in results]

    def worst(name: str | None, index: int) -> float:
        rows = logits[name][index]
        chosen = rows[np.arange(len(outputs[index])), outputs[index]]
        return float((rows.max(axis=-1) - chosen).max())

    logits = {n: output_logits(world.merged[n], PROMPTS, outputs) for n in ("a", "b", None)}
    for index, name in enumerate(NAMES):
        assert worst(name, index) < 0.3
        assert all(worst(other, index) > 1 for other in logits if other != name)
