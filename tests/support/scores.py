"""The right scores, by the plain JAX forward pass."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forced import LOGPROB_TOLERANCE, logprobs, output_logits


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


def reference(
    model: Path, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
) -> list[np.ndarray]:
    """The log-probabilities of the whole vocabulary at each position, [len(continuation), V]."""
    return [logprobs(rows) for rows in output_logits(model, prompts, continuations)]


def chosen(rows: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    return rows[np.arange(len(token_ids)), token_ids]


def assert_scores(
    model: Path,
    prompts: Sequence[list[int]],
    continuations: Sequence[list[int]],
    results: Sequence[dict[str, Any]],
) -> None:
    """Every value is the reference's, in the order of the prompts."""
    expected = reference(model, prompts, continuations)
    for index, (rows, result) in enumerate(zip(expected, results, strict=True)):
        assert result["meta_info"]["prompt_index"] == index
        assert result["continuation_ids"] == continuations[index]
        assert len(result["logprobs"]) == len(continuations[index])
        error = np.abs(chosen(rows, continuations[index]) - result["logprobs"]).max()
        assert error < LOGPROB_TOLERANCE, (index, error)


def assert_prompt_logprobs(model: Path, prompt: list[int], meta: dict[str, Any]) -> None:
    """`input_token_logprobs` are the reference's, from `logprob_start_len` on."""
    start, entries = meta["logprob_start_len"], meta["input_token_logprobs"]
    assert [token_id for _, token_id, _ in entries] == prompt[start:]
    values = [value for value, *_ in entries]
    if start == 0:
        assert values.pop(0) is None
        start = 1
    rows = reference(model, [prompt[:start]], [prompt[start:]])[0] if values else np.zeros((0, 1))
    assert np.abs(chosen(rows, prompt[start:]) - values).max(initial=0) < LOGPROB_TOLERANCE


def assert_named(rows: np.ndarray, named: Sequence[int], entries: Sequence[Any]) -> None:
    """The log-probabilities of these ids at each position, in their order. The ids may be
    improbable, and float32 has a relative error of 1e-5 at -12."""
    assert [[token_id for _, token_id, _ in place] for place in entries] == [[*named]] * len(rows)
    values = np.array([[value for value, _, _ in place] for place in entries])
    np.testing.assert_allclose(values, rows[:, [*named]], rtol=1e-5, atol=LOGPROB_TOLERANCE)
