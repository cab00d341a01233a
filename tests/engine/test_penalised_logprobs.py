"""Log-probabilities under penalties and `min_new_tokens` are those of the penalised law:
softmax((logits + penalties) / temperature), before top-k, top-p and min-p; at temperature 0 of
softmax(logits + penalties). Logits are the plain JAX reference's, all else here is NumPy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from tests.support.forced import logprobs, output_logits
from tests.support.liveness import SECONDS, callers, paused, running, until
from tests.support.marks import steady_decode
from tests.support.pools import MakePool
from tests.support.steady import steps

PROMPTS = [[65, 66, 67], [90] * 20, [70, 71], list(range(40, 60))]
LENGTH = 24
STOPS = list(range(20, 200))  # so many that banning stop ids changes the result

LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frequency": {"frequency_penalty": 1.5},
    "frequency below 0": {"frequency_penalty": -0.75},
    "presence": {"presence_penalty": 2.0},
    "both": {"frequency_penalty": 0.75, "presence_penalty": -1.25},
    "min_new_tokens": {"min_new_tokens": LENGTH, "stop_token_ids": STOPS, "ignore_eos": False},
    "all": {
        "min_new_tokens": 12, "stop_token_ids": [30, 31], "ignore_eos": False,
        "frequency_penalty": 1.0, "presence_penalty": 1.0,
    },
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "sampling_seed": 3},
    "narrow": {"temperature": 1.4, "sampling_seed": 4, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
}


def params(law: str, way: str) -> dict[str, Any]:
    return {"max_new_tokens": LENGTH, "ignore_eos": True} | WAYS[way] | LAWS[law]


def penalised(logits: np.ndarray, output: Sequence[int], given: dict[str, Any], eos: int) -> Any:
    """The logits of each output token with the penalties for the tokens before it, and with stop
    ids banned."""
    rows = logits.astype(np.float64)
    for position, row in enumerate(rows):
        counts = np.bincount(output[:position], minlength=len(row))
        row -= counts * given.get("frequency_penalty", 0.0)
        row -= (counts > 0) * given.get("presence_penalty", 0.0)
        if position < given.get("min_new_tokens", 0):
            row[[*given.get("stop_token_ids", []), eos]] = -np.inf
    return rows


def check(
    pool: EnginePool,
    model: Path,
    prompts: Sequence[list[int]],
    given: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
) -> None:
    """Each result follows its law. Greedy ids are the most probable."""
    eos = pool.engines[0].tokenizer_manager.tokenizer.eos_token_id
    outputs = [result["output_ids"] for result in results]
    logits = output_logits(model, prompts, outputs)
    for rows, output, one, result in zip(logits, outputs, given, results, strict=True):
        assert len(output) >= max(1, one.get("min_new_tokens", 0))
        law = penalised(rows, output, one, eos)
        wanted = logprobs(law, one["temperature"] or 1.0)
        entries = result["meta_info"]["output_token_logprobs"]
        got = [logprob for logprob, _, _ in entries]
        places = np.arange(len(output))
        assert got == pytest.approx(wanted[places, output], abs=1e-4)
        if not one["temperature"]:
            assert (law.max(axis=-1) - law[places, output]).max() < 1e-3
        for position, top in enumerate(result["meta_info"].get("output_top_logprobs", [])):
            best = np.sort(wanted[position])[::-1][: len(top)]
            assert [value for value, _, _ in top] == pytest.approx(best, abs=1e-4)


@pytest.fixture
def model(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("qwen3")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("law", LAWS)
def test_alone(pool: EnginePool, model: Path, law: str, way: str) -> None:
    """A request alone in its engine, with the most probable ids."""
    given = params(law, way)
    result = pool.generate_all(
        input_ids=PROMPTS[:1], sampling_params=given, return_logprob=True, top_logprobs_num=3
    )
    check(pool, model, PROMPTS[:1], [given], result)


def test_differs(pool: EnginePool, model: Path) -> None:
    """The penalised law differs from the plain one, so a check against plain logits would fail."""
    given = params("frequency", "greedy")
    result = pool.generate(input_ids=PROMPTS[0], sampling_params=given, return_logprob=True)
    plain = logprobs(output_logits(model, PROMPTS[:1], [result["output_ids"]])[0])
    got = [logprob for logprob, _, _ in result["meta_info"]["output_token_logprobs"]]
    assert np.abs(got - plain[np.arange(LENGTH), result["output_ids"]]).max() > 1


@steady_decode
def test_mixed(make_pool: MakePool, model: Path) -> None:
    """Every law and every way of sampling in the same batches of one engine."""
    pool = make_pool("qwen3", 1)
    given = [params(law, way) for law in LAWS for way in WAYS]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(given))]
    before = steps(pool)
    results = pool.generate_all(
        input_ids=prompts, sampling_params=given, return_logprob=True, top_logprobs_num=20
    )
    check(pool, model, prompts, given, results)
    steady, fallback = (now - then for now, then in zip(steps(pool), before, strict=True))
    assert steady > fallback == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_after_a_retract(make_pool: MakePool, model: Path, mode: Any) -> None:
    """Retracted requests also count the tokens that they had before."""
    pool = make_pool("qwen3", 1)
    laws = ["frequency", "presence", "both", "min_new_tokens"]
    given = [params(law, way) | {"max_new_tokens": 100} for law in laws for way in WAYS]
    for one in given:
        if "min_new_tokens" in one:
            one["min_new_tokens"] = 100
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(given))]
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=prompts, sampling_params=given, return_logprob=True
        )
        for _ in range(6):
            until(lambda: running(pool) or call.done())
            steps = pool.stats()["engines"][0]["steps"]
            until(lambda s=steps: call.done() or pool.stats()["engines"][0]["steps"] > s + 9)
            with paused(pool, mode):
                pass
        check(pool, model, prompts, given, call.result(SECONDS))
