"""Through a pool the harness gets the scores of a plain JAX forward pass.

Skipped where lm_eval is not installed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from tests.support.pools import SMALL
from tests.support.reference import make_random_model
from tests.support.scores import chosen, reference
from tests.support.servers import serving

lm_eval = pytest.importorskip("lm_eval")

DOCUMENTS = [
    {"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1), "7"], "answer": 0}
    for a, b in ((1, 2), (12, 7), (40, 2), (9, 9), (33, 10), (5, 0))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1, std=0.1)


@pytest.fixture(scope="module")
def pool(model: Path) -> Iterator[EnginePool]:
    with EnginePool(str(model), devices=2, **SMALL) as pool:
        yield pool


@pytest.fixture
def lm(pool: EnginePool) -> Any:
    from enginepool.evaluation import PoolLM

    return PoolLM(pool)


def evaluate(lm: Any, folder: Path, documents: list[dict[str, Any]], **config: Any) -> Any:
    """Run a task of these documents."""
    from lm_eval.api.task import ConfigurableTask

    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    task = ConfigurableTask(
        config={
            "task": "sums",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **config,
        }
    )
    return lm_eval.evaluate(lm, {"sums": task}, bootstrap_iters=0, log_samples=True)


def ids(lm: Any, text: str) -> list[int]:
    return lm.tokenizer.encode(text)


MULTIPLE_CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
}


def test_multiple_choice(lm: Any, model: Path, tmp_path: Path) -> None:
    """Each choice's log-probability, whether the choice is greedy, and the accuracy that
    follows."""
    assert_choices(lm, model, evaluate(lm, tmp_path, DOCUMENTS, **MULTIPLE_CHOICE))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_multiple_choice_over_http(
    lm: Any, pool: EnginePool, model: Path, tmp_path: Path, batch_size: int
) -> None:
    """The same by `local-completions`: echo with logprobs, from a server in this process."""
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with serving(pool) as running:
        client = LocalCompletionsAPI(
            base_url=f"{running.url()}/v1/completions", model=str(model), batch_size=batch_size,
            max_retries=1, max_length=256,
        )  # fmt: skip
        assert_choices(lm, model, evaluate(client, tmp_path, DOCUMENTS, **MULTIPLE_CHOICE))


def assert_choices(lm: Any, model: Path, results: Any) -> None:
    """The results are those of plain JAX."""
    right = 0
    samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(DOCUMENTS)
    for document, sample in zip(DOCUMENTS, samples, strict=True):
        prompts = [ids(lm, document["question"])] * 3
        choices = [ids(lm, choice) for choice in document["choices"]]
        expected = []
        for rows, choice, [(value, greedy)] in zip(
            reference(model, prompts, choices), choices, sample["resps"], strict=True
        ):
            expected.append(chosen(rows, choice).sum())
            assert float(value) == pytest.approx(expected[-1], abs=1e-4)
            assert str(greedy) == str(rows.argmax(axis=-1).tolist() == choice)
        right += int(np.argmax(expected)) == document["answer"]
    assert results["results"]["sums"]["acc,none"] == pytest.approx(right / len(DOCUMENTS))


def test_perplexity(lm: Any, model: Path, tmp_path: Path) -> None:
    """Also for a text that is longer than the context. It is scored in windows, each token once."""
    documents = [{"text": "1+1=2. "}, {"text": "The quick brown fox. " * 40}]
    results = evaluate(
        lm,
        tmp_path,
        documents,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity"}],
    )
    samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
    values = [float(sample["filtered_resps"][0]) for sample in samples]
    for document, value in zip(documents, values, strict=True):
        tokens = [lm.prefix_token_id, *ids(lm, document["text"])]
        total, done, width = 0.0, 1, lm.max_length - 1
        while done < len(tokens):
            end = min(done + width, len(tokens))
            begin = max(0, end - 1 - width)
            rows = reference(model, [tokens[begin:done]], [tokens[done:end]])[0]
            total += chosen(rows, tokens[done:end]).sum()
            done = end
        assert value == pytest.approx(total, abs=1e-4 * len(tokens))


GENERATION: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "target_delimiter": "",
    "generation_kwargs": {"until": ["a"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def test_generation(lm: Any, pool: EnginePool, tmp_path: Path) -> None:
    """Greedy up to a stop string, as the pool itself generates."""
    assert_generated(pool, evaluate(lm, tmp_path, DOCUMENTS, **GENERATION))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generation_over_http(
    pool: EnginePool, model: Path, tmp_path: Path, batch_size: int
) -> None:
    """The same by `local-completions`."""
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with serving(pool) as running:
        client = LocalCompletionsAPI(
            base_url=f"{running.url()}/v1/completions", model=str(model), batch_size=batch_size,
            max_retries=1, max_length=256,
        )  # fmt: skip
        assert_generated(pool, evaluate(client, tmp_path, DOCUMENTS, **GENERATION))


def assert_generated(pool: EnginePool, results: Any) -> None:
    samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
    expected = pool.generate_all(
        [document["question"] for document in DOCUMENTS],
        {"temperature": 0, "max_new_tokens": 12, "stop": ["a"]},
    )
    for sample, result in zip(samples, expected, strict=True):
        assert sample["resps"] == [[result["text"]]]


def test_a_context_that_is_too_long_loses_its_beginning(lm: Any, model: Path) -> None:
    context, continuation = "9" * 600, "12"
    request = lm_eval.api.instance.Instance(
        request_type="loglikelihood", doc={}, arguments=(context, continuation), idx=0
    )
    [(value, _)] = lm.loglikelihood([request], disable_tqdm=True)
    after = ids(lm, continuation)
    before = ids(lm, context)[-(lm.max_length - len(after)) :]
    rows = reference(model, [before], [after])[0]
    assert value == pytest.approx(chosen(rows, after).sum(), abs=1e-4)
