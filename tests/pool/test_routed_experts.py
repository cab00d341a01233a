"""Which experts routed each token: those of a plain JAX Qwen3-MoE along the same tokens."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, rl
from enginepool.engine.routed_experts import routing_of
from enginepool.toy.files import read_checkpoint
from scripts.train_toy.checkpoint import write_checkpoint
from tests.pool.test_bad_input import refused
from tests.support import faults
from tests.support.families import parameter_shapes, routing
from tests.support.liveness import SECONDS, callers, until
from tests.support.marks import steady_decode
from tests.support.pools import SMALL, compilations, same
from tests.support.reference import random_config
from tests.support.scores import ids
from tests.support.servers import serving
from tests.support.steady import several_at_once, upstreams_own

LAYERS, TOP_K, DENSE = 3, 2, 1
SAMPLED = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True, "max_new_tokens": 30}
# One is prefilled in chunks.
PROMPTS = [ids(length, length) for length in (3, 150, 40, 1, 70)]


def write(folder: Path, seed: int) -> Path:
    """A Qwen3-MoE whose second layer has no experts."""
    config = random_config("qwen3_moe", LAYERS, 2, 1, np.float32) | {"mlp_only_layers": [DENSE]}
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(float(name.endswith("norm.weight")), 0.15, shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    write_checkpoint(folder, params, config, np.float32)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write(tmp_path_factory.mktemp("moe"), seed) for seed in (1, 2)]


OPTIONS: dict[str, Any] = SMALL | {"moe_backend": "epmoe", "enable_return_routed_experts": True}


@pytest.fixture(scope="module")
def pool(models: list[Path]) -> Iterator[EnginePool]:
    with EnginePool(str(models[0]), devices=2, **OPTIONS) as pool:
        yield pool


@pytest.fixture(scope="module")
def one(models: list[Path]) -> Iterator[EnginePool]:
    with EnginePool(str(models[0]), devices=1, **OPTIONS) as pool:
        yield pool


@pytest.fixture
def own_weights(one: EnginePool, models: list[Path]) -> Iterator[None]:
    yield
    one.update_weights(models[0], weight_version=0)


def ask(pool: EnginePool, prompts: Sequence[list[int]], params: Any, **options: Any) -> list[Any]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, return_routed_experts=True, **options
    )


def rows_of(meta: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    return flat.reshape(-1, LAYERS, TOP_K)


def expected(model: Path, tokens: Sequence[int]) -> np.ndarray:
    """Those of the reference, sorted."""
    padded = np.zeros((1, SMALL["context_length"]), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.sort(np.asarray(reference(model)(padded))[0, : len(tokens)], axis=-1)


@cache
def reference(model: Path) -> Callable[[np.ndarray], Any]:
    config, params = read_checkpoint(model)
    as_float32 = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return partial(jax.jit(partial(routing, config)), as_float32)


def assert_rows(model: Path, prompt: list[int], result: Any, start: int = 0, end: int = 0) -> None:
    """From position `start` up to `end`, or to the last."""
    tokens = [*prompt, *result["output_ids"]][:-1]
    rows = rows_of(result["meta_info"])
    assert len(rows) == len(tokens)
    assert (rows[:, DENSE] == -1).all()
    routed = np.sort(np.delete(rows, DENSE, axis=1), axis=-1)
    part = slice(start, end or None)
    np.testing.assert_array_equal(routed[part], expected(model, tokens)[part])


def test_prompts_and_outputs(pool: EnginePool, models: list[Path]) -> None:
    """On several engines, in chunks, in launches of several steps. Others do not ask. Nothing is
    compiled."""
    others: Any = {"input_ids": PROMPTS[:3], "sampling_params": SAMPLED}
    with compilations() as seen, callers(1) as executor, several_at_once():
        plain = executor.submit(pool.generate_all, **others, return_logprob=True)
        results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
        same(results[:3], plain.result(SECONDS))
    assert seen == []
    assert not any("routed_experts" in one["meta_info"] for one in plain.result())
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


@steady_decode
def test_upstreams_own_steps(one: EnginePool, models: list[Path]) -> None:
    with upstreams_own(one):
        results = ask(one, PROMPTS, SAMPLED)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_prefixes_that_are_cached(one: EnginePool, models: list[Path]) -> None:
    """Of a prompt, and of an output of somebody who did not ask."""
    first = ids(100, 3)
    (plain,) = one.generate_all(input_ids=[first], sampling_params=SAMPLED)
    longer = [*first, *plain["output_ids"], 5, 6]
    for prompt in (first, longer, longer):
        (result,) = ask(one, [prompt], SAMPLED)
        assert result["meta_info"]["cached_tokens"] > 90
        assert_rows(models[0], prompt, result)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_over_a_pause(one: EnginePool, models: list[Path], mode: Any) -> None:
    channel = one.runtime.workers[0].channel
    let_go = faults.hang_in_step(one, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(ask, one, PROMPTS[:3], SAMPLED)
        assert let_go.begun.wait(SECONDS)
        pause = executor.submit(one.pause_generation, mode)
        until(channel.has_jobs)
        let_go.set()
        pause.result(SECONDS)
        one.continue_generation()
        results = answer.result(SECONDS)
    for prompt, result in zip(PROMPTS[:3], results, strict=True):
        assert_rows(models[0], prompt, result)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_over_a_swap(one: EnginePool, models: list[Path], own_weights: None, mode: Any) -> None:
    """A row is of the weights that sampled the token behind it, also if it is computed again."""
    channel = one.runtime.workers[0].channel
    let_go = faults.hang_in_step(one, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(ask, one, PROMPTS[:3], SAMPLED)
        assert let_go.begun.wait(SECONDS)
        swap = executor.submit(one.update_weights, models[1], mode=mode, weight_version=1)
        until(channel.has_jobs)
        let_go.set()
        swap.result(SECONDS)
        results = answer.result(SECONDS)
    for prompt, result in zip(PROMPTS[:3], results, strict=True):
        (_, end, _), _ = result["meta_info"]["weight_versions"]
        last_of_old = len(prompt) + end - 1
        assert_rows(models[0], prompt, result, end=last_of_old)
        if mode == "retract":
            assert_rows(models[1], prompt, result, start=last_of_old)


def test_outputs_that_are_retracted(
    one: EnginePool, models: list[Path], retracted: list[int]
) -> None:
    """For want of KV cache, and go on later."""
    prompts = [[100 + n, 9] for n in range(6)]
    params = {"temperature": 1.0, "max_new_tokens": 300, "min_new_tokens": 300}
    results = ask(one, prompts, params)
    assert sum(retracted) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_an_output_that_goes_on(pool: EnginePool, models: list[Path]) -> None:
    """Its given tokens are prefilled, and have experts too."""
    (whole,) = ask(pool, PROMPTS[:1], SAMPLED, return_logprob=True)
    part = {
        "output_ids": whole["output_ids"][:9],
        "meta_info": {
            "output_token_logprobs": whole["meta_info"]["output_token_logprobs"][:9],
        },
    }
    options: Any = {"return_logprob": True, "partial_outputs": [part]}
    (result,) = ask(pool, PROMPTS[:1], SAMPLED, **options)
    assert result["output_ids"] == whole["output_ids"]
    assert_rows(models[0], PROMPTS[0], result)


def test_they_are_replayed(pool: EnginePool, one: EnginePool) -> None:
    """From the results alone."""
    results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
    again = rl.replay(one, results, PROMPTS, SAMPLED, version=0)
    assert again.same
    assert again.tokens == 150
    rows = rows_of(results[2]["meta_info"]).copy()
    rows[len(PROMPTS[2]) - 1 + 4] += 1  # the token at 4 was sampled from it
    results[2]["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    assert rl.replay(one, results, PROMPTS, SAMPLED, version=0).other_experts == [(2, 4)]


def test_on_the_wire(pool: EnginePool, models: list[Path]) -> None:
    """sglang's field; a stream has it at the end."""
    body = {"input_ids": PROMPTS[0], "sampling_params": SAMPLED, "return_routed_experts": True}
    with serving(pool) as running, running.http() as client:
        made = client.post("/generate", json=body).json()
        lines = client.post("/generate", json=body | {"stream": True}).text.splitlines()
        chat = {"messages": [{"role": "user", "content": "1"}], "return_routed_experts": True}
        reply = client.post("/v1/chat/completions", json=chat)
    assert_rows(models[0], PROMPTS[0], made)
    *chunks, done = [line[6:] for line in lines if line]
    assert done == "[DONE]"
    assert [("routed_experts" in json.loads(chunk)["meta_info"]) for chunk in chunks] == [
        *[False] * (len(chunks) - 1), True,
    ]  # fmt: skip
    assert reply.status_code == 400


def test_refusals(model_dir: Callable[[str], Path], keep_pool: Any) -> None:
    plain = keep_pool("qwen3", 4)
    refused(
        plain, lambda: plain.generate_all(input_ids=[[5]], return_routed_experts=True),
        "return_routed_experts=True", "enable_return_routed_experts=True", prompt=None,
    )  # fmt: skip
    dense = EnginePool(
        str(model_dir("qwen3")), devices=1, enable_return_routed_experts=True, **SMALL
    )
    with pytest.raises(InvalidConfig, match="no experts"):
        dense.open()
    with pytest.raises(InvalidConfig, match="moe_backend='fused'"):
        routing_of([None, None], np.dtype(np.uint8), SimpleNamespace(moe_backend="fused"))
