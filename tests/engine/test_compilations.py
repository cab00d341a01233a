"""After warm-up nothing is compiled, whatever is asked for. Engines share their programs."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from enginepool import EnginePool, toy
from enginepool.engine.executable_cache import ExecutableCache
from tests.support.liveness import until
from tests.support.marks import steady_decode
from tests.support.pools import SMALL, MakePool, compilations, open_with
from tests.support.steady import OPTIONS


def random_params(rng: random.Random) -> dict[str, Any]:
    """Any combination of sampling parameters."""
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 30)}
    if rng.random() < 0.8:
        options["temperature"] = rng.choice([0, 0.3, 1.0, 1.7])
    if rng.random() < 0.3:
        options["top_k"] = rng.choice([-1, 1, 5, 100])
    if rng.random() < 0.3:
        options["top_p"] = rng.choice([0.1, 0.7, 1.0])
    if rng.random() < 0.2:
        options["min_p"] = rng.choice([0.0, 0.2])
    if rng.random() < 0.3:
        options["sampling_seed"] = rng.randint(-(2**31), 2**31 - 1)
    if rng.random() < 0.3:
        options["frequency_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.3:
        options["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.3:
        options["min_new_tokens"] = rng.randint(0, options["max_new_tokens"])
    if rng.random() < 0.3:
        options["ignore_eos"] = True
    if rng.random() < 0.2:
        options["stop"] = rng.choice(["a", ["e", "\n\n"], "zq"])
    if rng.random() < 0.2:
        options["stop_token_ids"] = rng.sample(range(256), 3)
    if rng.random() < 0.15 and not (options.get("ignore_eos") or options.get("min_new_tokens")):
        options["regex"] = rng.choice(["[a-z]{1,20}", "(ab|c)+", "9"])
    if rng.random() < 0.1:
        options["n"] = rng.randint(2, 3)
    return options


def random_prompt(rng: random.Random) -> list[int]:
    length = rng.choice([1, 2, rng.randint(3, 64), rng.randint(65, 200)])
    return rng.choices(range(256), k=length)


def random_call(pool: EnginePool, rng: random.Random) -> int:
    """Make a random kind of call. Returns how many prompts it had."""
    prompts = [random_prompt(rng) for _ in range(rng.randint(1, 24))]
    each = [random_params(rng) for _ in prompts]
    options: dict[str, Any] = {
        "input_ids": prompts,
        "return_logprob": rng.random() < 0.5,
        "top_logprobs_num": rng.choice([0, 0, 1, 3, 20]),
        "token_ids_logprob": rng.choice([None, None, [7], rng.choices(range(256), k=64)]),
        "return_prompt_logprob": rng.random() < 0.2,
    }
    kind = rng.choice(["all", "all", "stream", "leave", "timeout", "flush", "pause"])
    if kind in ("all", "timeout"):
        timeout = 0.05 if kind == "timeout" else None
        pool.generate_all(None, each, timeout=timeout, **options)
    else:
        for number, chunk in enumerate(pool.stream(None, each, **options)):
            if kind == "leave" and number == 5:
                break
            if number == 3:
                pool.abort_request(chunk["meta_info"]["id"])
            if number == 5 and kind == "flush":
                pool.flush_cache()
            if number == 5 and kind == "pause":
                pool.pause_generation(rng.choice(["retract", "in_place"]))
                pool.continue_generation()
    return len(prompts)


def test_nothing_is_compiled_after_warm_up(pool: EnginePool):
    """200 random requests: lengths, sampling, log-probabilities, streams, aborts, pauses."""
    rng = random.Random(20)
    done = 0
    with compilations() as seen:
        while done < 200:
            done += random_call(pool, rng)
    assert seen == []


def test_new_weights_compile_no_step(make_pool: MakePool):
    """Four engines add, then subtract, then add again. New weights compile no program of a step,
    and an update compiles its own programs once. KV caches that were released compile nothing."""
    pool = make_pool("toy", 4)
    rng = random.Random(4)
    greedy = {"temperature": 0, "max_new_tokens": 8}
    assert answered(pool, greedy) == {"19"}
    pool.update_weights(toy.checkpoint("subtract"))
    with compilations() as seen:
        assert answered(pool, greedy) == {"5"}
        for _ in range(2):
            random_call(pool, rng)
        for mode in ("retract", "in_place", "abort"):
            pool.update_weights(toy.checkpoint("add"), mode=mode)
            assert answered(pool, greedy) == {"19"}
        pool.release_memory_occupation()
        pool.resume_memory_occupation()
        pool.update_weights(toy.checkpoint("subtract"), free_kv=True)
        assert answered(pool, greedy) == {"5"}
        random_call(pool, rng)
        pool.update_weights(toy.checkpoint("add"), weight_version=0)
    assert seen == []


def answered(pool: EnginePool, params: dict[str, Any]) -> set[str]:
    """The answers of batches of one to sixteen to 12+7, the largest until every engine had a part
    of one: an engine that is busy, or slow to wake, leaves its part to others."""
    texts, engines = set(), set()

    def answer(count: int) -> bool:
        results = pool.generate_all(["12+7="] * count, params)
        texts.update(result["text"] for result in results)
        engines.update(result["meta_info"]["engine_index"] for result in results)
        return engines == {0, 1, 2, 3}

    for count in (1, 6, 11):
        answer(count)
    engines.clear()
    until(lambda: answer(16))
    return texts


def test_the_count_sees_a_compilation():
    """The test above relies on this."""
    with compilations() as seen:
        jax.jit(lambda x: x * 3.5 + 17)(2.0).block_until_ready()
    assert len(seen) > 0
    with compilations() as seen:
        pass
    jax.jit(lambda x: x * 4.5 + 17)(2.0).block_until_ready()
    assert seen == []


@pytest.mark.slow
def test_first_call_of_a_warm_pool_compiles_nothing(make_pool: MakePool):
    """Also with several buckets, of which the first request needs the smallest."""
    pool = make_pool("toy", 2, precompile_token_paddings=[32, 64], precompile_bs_paddings=[1, 4])
    with compilations() as seen:
        pool.generate("12+7=")
        pool.generate_all(["1+1="] * 20, {"temperature": 1.0, "max_new_tokens": 5})
        pool.generate_all(["1+1=" * 20] * 3, {"max_new_tokens": 5}, top_logprobs_num=4)
    assert seen == []


def test_engines_share_what_one_has_compiled(pool: EnginePool):
    """On CPU a program is compiled once and is loaded for the other three devices.

    There are not exactly three more loads: small programs that JAX still has from earlier tests are
    neither compiled nor loaded.
    """
    counts = pool.stats()["executables"]
    assert counts["reused"] > counts["compiled"]


@steady_decode
def test_what_is_compiled_ahead_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache, model_dir: Callable[[str], Path]
):
    """Other threads compile the step's program of each bucket during upstream's warm-up. They do
    not call it: a thread that calls it waits in JAX while the engine's thread compiles it, and
    holds the slot that the engine's thread needs next. A program that the engine's own thread
    compiles under one of their names was compiled in vain."""
    threads: dict[str, list[str]] = {}

    class Recording(ExecutableCache):
        def load_or_compile(self, backend: Any, module: Any, devices: Any, options: Any) -> Any:
            program = str(module.operation.attributes["sym_name"])
            threads.setdefault(program, []).append(threading.current_thread().name)
            return super().load_or_compile(backend, module, devices, options)

    open_with(monkeypatch, Recording(one_cache.serialized))
    with EnginePool(str(model_dir("qwen3")), devices=1, **SMALL | OPTIONS) as pool:
        buckets = pool.engines[0].scheduler_info["scheduler"].steady.program.buckets
    helpers = {
        name: [each.startswith("compile-ahead") for each in by] for name, by in threads.items()
    }
    assert sum(map(sum, helpers.values())) == len(buckets) == 2
    assert {name: threads[name] for name, by in helpers.items() if any(by) and not all(by)} == {}


@pytest.mark.slow
@steady_decode
def test_steady_decode_needs_few_programs(monkeypatch: pytest.MonkeyPatch):
    """At most 1.5 times as many as without it, whatever a batch may ask for."""
    # Programs that a process compiles once, for its first pool, do not count.
    with EnginePool(str(toy.checkpoint()), devices=1, **SMALL):
        pass
    place = "enginepool.engine.steady.program._ATTENTION"
    options = SMALL | {"precompile_bs_paddings": [1, 4]}
    counts = {}
    for attention in ((), ("NativeAttention",)):
        monkeypatch.setattr(place, attention)
        open_with(monkeypatch, None)
        with EnginePool(str(toy.checkpoint()), devices=1, **options) as pool:
            counts[attention] = pool.stats()["executables"]["compiled"]
    without, with_them = counts.values()
    assert with_them <= 1.5 * without


def test_without_warm_up_programs_are_compiled_while_serving(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache
):
    """A pool opens faster without warm-up, and gives the same answers."""
    open_with(monkeypatch, ExecutableCache(one_cache.serialized))  # nothing is traced yet
    with compilations() as seen:
        pool = make_pool("toy", 1, warmup="none")
        before = len(seen)
        assert pool.generate("12+7=")["text"] == "19"
    assert len(seen) > before
