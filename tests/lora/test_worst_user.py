"""Adapters under a user who does everything at once."""

import threading
from collections.abc import Callable, ItemsView
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest
from tests.lora.conftest import World
from tests.lora.test_exact import GREEDY, PROMPTS, check, load
from tests.lora.test_updates import LONG, ask
from tests.support import faults
from tests.support.adapters import agrees, config, ids_of, merged
from tests.support.liveness import callers, paused, running, until, waiting
from tests.support.reference import reference_greedy_batch

MANY: list[str | None] = [*"abcd", None] * 4
MANY_PROMPTS = ids_of(8, [4 + 3 * i % 40 for i in range(len(MANY))])


class Slow(dict[str, np.ndarray]):
    """Arrays that cannot be read before `go` is set."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.asked, self.go = threading.Event(), threading.Event()

    def items(self) -> ItemsView[str, np.ndarray]:
        self.asked.set()
        self.go.wait()
        return super().items()


def greedy(pool: EnginePool, prompts: Any, names: Any, params: Any = GREEDY) -> list[Any]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, lora_path=names, return_logprob=True
    )


def serving(pool: EnginePool) -> bool:
    return all(engine["state"] == "serving" for engine in pool.stats()["engines"])


def test_one_name_from_many_threads(adapted: EnginePool, world: World) -> None:
    """Every load succeeds, and all engines have the last version."""
    with callers() as threads:
        loads = [
            threads.submit(
                adapted.load_lora_adapter, "x", world.folders["ab"[version % 2]],
                weight_version=version, mode=("drain", "in_place")[version // 4],
            )
            for version in range(8)
        ]  # fmt: skip
        assert {load.result().weight_version for load in loads} == set(range(8))
    last = adapted.stats()["lora_adapters"]["x"]["weight_version"]
    results = greedy(adapted, PROMPTS * 4, "x")
    check(world, PROMPTS * 4, ["ab"[last % 2]] * len(results), results)
    assert {r["meta_info"]["engine_index"] for r in results} == {0, 1}


def test_unloaded_while_a_new_version_is_read(adapted: EnginePool, world: World) -> None:
    """Outputs continue under the old version. Load and unload run one after the other."""
    load(adapted, world, "a")
    slow = Slow(world.arrays["b"])
    with callers() as threads:
        loading = threads.submit(adapted.load_lora_adapter, "a", slow, config_dict=config(3))
        slow.asked.wait()
        unloading = threads.submit(adapted.unload_lora_adapter, "a")
        check(world, PROMPTS, ["a"] * len(PROMPTS), greedy(adapted, PROMPTS, "a"))
        slow.go.set()
        loading.result()
        unloading.result()
    assert adapted.stats()["lora_adapters"] == {}
    with pytest.raises(InvalidRequest, match="no such adapter"):
        adapted.generate(input_ids=PROMPTS[0], lora_path="a")


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
def test_another_one_of_the_name_of_an_unloaded_one(
    mode: Any, adapted: EnginePool, world: World
) -> None:
    """Requests for the unloaded adapter finish with it, whatever is loaded under its name next."""
    adapted.load_lora_adapter("x", world.folders["a"])
    staged = adapted.stage_lora_adapter("x", world.folders["b"])
    with callers() as threads:
        with paused(adapted):
            call = ask(adapted, threads, "x")
            until(lambda: waiting(adapted) == len(PROMPTS))
            adapted.unload_lora_adapter("x")
            staged.commit()
        until(lambda: running(adapted) > 0 or call.done())
        adapted.load_lora_adapter("x", world.folders["c"], mode=mode)
        check(world, PROMPTS, ["a"] * len(PROMPTS), call.result())
    check(world, PROMPTS, ["c"] * len(PROMPTS), greedy(adapted, PROMPTS, "x"))


@pytest.mark.parametrize("options", [{"staging": "stream"}, {"mode": "in_place"}])
def test_new_base_weights_while_an_adapter_is_read(
    options: Any,
    adapted: EnginePool,
    world: World,
    target: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    both = merged(tmp_path / "merged", target("qwen3"), world.arrays["b"], 8 / 3)
    load(adapted, world, "a")
    slow = Slow(world.arrays["b"])
    try:
        with callers() as threads:
            loading = threads.submit(adapted.load_lora_adapter, "a", slow, config_dict=config(3))
            slow.asked.wait()
            call = ask(adapted, threads, ["a", None] * 3)
            until(lambda: running(adapted) > 0 or call.done())
            update = threads.submit(adapted.update_weights, target("qwen3"), **options)
            slow.go.set()
            loading.result()
            update.result()
            assert {len(result["output_ids"]) for result in call.result()} == {40}
        results = greedy(adapted, PROMPTS[:2], ["a", None])
    finally:
        adapted.update_weights(world.model, weight_version=0)
    for place, prompt, result in zip((both, target("qwen3")), PROMPTS, results, strict=False):
        assert agrees(result, reference_greedy_batch(place, [prompt], len(result["output_ids"]))[0])


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_fault_under_more_adapters_than_slots(
    rebuilt: bool, adapted: EnginePool, world: World
) -> None:
    load(adapted, world, *"abcd")
    error = RuntimeError("RESOURCE_EXHAUSTED: gone") if rebuilt else None
    faults.raise_in_step(adapted, 0, at=5, error=error)
    faults.raise_in_step(adapted, 1, at=7)
    results = greedy(adapted, MANY_PROMPTS, MANY)
    check(world, MANY_PROMPTS, MANY, results)
    until(lambda: serving(adapted))


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place"])
def test_updates_while_adapters_wait_for_a_slot(
    mode: Any, adapted: EnginePool, world: World
) -> None:
    """An update of an adapter, then one of the base, both in this mode. Nothing is lost."""
    load(adapted, world, *"abcd")
    with callers() as threads:
        call = threads.submit(greedy, adapted, MANY_PROMPTS, MANY, LONG)
        until(lambda: running(adapted) > 0)
        adapted.load_lora_adapter("d", world.folders["a"], mode=mode)
        free = mode != "in_place"  # which needs the KV cache
        adapted.update_weights(world.model, mode=mode, weight_version=0, free_kv=free)
        results = call.result()
    assert {len(result["output_ids"]) for result in results} == {40}
    kept = [i for i, name in enumerate(MANY) if name != "d"]
    check(
        world,
        [MANY_PROMPTS[i] for i in kept],
        [MANY[i] for i in kept],
        [results[i] for i in kept],
    )


def test_paused_without_kv_cache(adapted: EnginePool, world: World) -> None:
    """Adapters wait for slots, are replaced and are unloaded meanwhile."""
    load(adapted, world, *"abcd")
    with callers() as threads, paused(adapted):
        call = threads.submit(greedy, adapted, MANY_PROMPTS, MANY)
        until(lambda: waiting(adapted) == len(MANY))
        adapted.release_memory_occupation()
        adapted.load_lora_adapter("c", world.folders["a"], mode="retract")
        adapted.unload_lora_adapter("b")
        adapted.resume_memory_occupation()
        adapted.continue_generation()
        results = call.result()
    check(world, MANY_PROMPTS, ["a" if name == "c" else name for name in MANY], results)


def test_an_adapter_that_overflows(adapted: EnginePool, world: World) -> None:
    """Its own outputs end and give the reason. Other outputs of the batch are right, and so is
    its next version."""
    load(adapted, world, "a")
    huge = {
        name: value * np.float32(1e25) if ".lora_B." in name else value
        for name, value in world.arrays["b"].items()
    }
    adapted.load_lora_adapter("x", huge, config_dict=config(3), weight_version="huge")
    names = ["x", "a", None, "a", None, "x"]
    results = greedy(adapted, PROMPTS, names)
    for name, prompt, result in zip(names, PROMPTS, results, strict=True):
        reason = result["meta_info"]["finish_reason"]
        if name == "x":
            assert (reason["type"], reason["err_type"]) == ("abort", "not_finite")
            assert "adapter 'x' of version 'huge'" in reason["message"]
        else:
            check(world, [prompt], [name], [result])
    until(lambda: serving(adapted))
    adapted.load_lora_adapter("x", world.folders["b"])
    check(world, PROMPTS, ["b"] * len(PROMPTS), greedy(adapted, PROMPTS, "x"))
