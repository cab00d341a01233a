"""What an engine computes, against plain JAX in float32 (enginepool/toy/model.py)."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.span_checks import Finished, check_tokens, output_logprobs
from enginepool import EnginePool
from enginepool.doctor.first_run.checklist import Finding

_LENGTHS, _SMALL_LENGTHS = (7, 33, 64, 120, 5, 90, 17, 200), (7, 3, 20, 12)
# The reference computes one output at a time, because a real vocabulary's logits are large. It pads
# outputs to a multiple of 256 tokens, so there is one program.
_SHAPE = 1, 256
# The largest error of a log-probability. On CPU it stays below a tenth of this.
_LARGEST_ERROR = 1e-3


def float32(job: dict[str, Any], server_args: dict[str, Any], found: Finding) -> None:
    """Greedy ids and log-probabilities of a pool in float32."""
    options: dict[str, Any] = server_args | {"dtype": "float32", "warmup": "none"}
    with (
        jax.default_matmul_precision("highest"),
        EnginePool(job["model"], devices=1, **options) as pool,
    ):
        found.problems += compare(job, pool, found)
        found.seen["matmul_precision"] = pool.stats()["engines"][0]["matmul_precision"]
    error = found.seen["largest_error"]
    found.expect(
        error <= _LARGEST_ERROR,
        f"a log-probability is {error:.2g} off; {_LARGEST_ERROR:g} is allowed",
    )


def compare(job: dict[str, Any], pool: EnginePool, found: Finding) -> list[str]:
    """See how far log-probabilities of greedy outputs are from the reference's for the same ids.
    Returns the outputs with ids that the reference would not choose."""
    rng, model = random.Random(3), Path(job["model"])
    lengths, count = (_SMALL_LENGTHS, 12) if job["small"] else (_LENGTHS, 48)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in lengths]
    results = pool.generate_all(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
        return_logprob=True,
    )
    outputs = [Finished(*pair) for pair in zip(prompts, results, strict=True)]
    compared = check_tokens(outputs, lambda *_: model, _SHAPE)
    errors: list[float] = []
    for one in outputs:
        [values] = output_logprobs(model, [one], _SHAPE)
        entries = one.result["meta_info"]["output_token_logprobs"]
        errors += map(float, np.abs(values - np.array([value for value, *_ in entries])))
    found.seen |= {"outputs": len(outputs), "wrong": len(compared.violations)}
    found.seen |= {"tokens": len(errors), "largest_error": max(errors)}
    found.seen["mean_error"] = statistics.mean(errors)
    return compared.violations
