"""What an engine computes, against plain JAX in float32 (enginepool/toy/model.py)."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_load import options
from benchmarks.synthetic import read_model
from enginepool import EnginePool
from enginepool.doctor.first_run.checklist import Finding
from enginepool.toy.model import forward

_LENGTHS, _SMALL_LENGTHS = (7, 33, 64, 120, 5, 90, 17, 200), (7, 3, 20, 12)
# Where the two best logits are closer, either is right, and the comparison ends.
_TIE = 1e-3
# The largest error of a log-probability. On CPU it stays below a tenth of this.
_LARGEST_ERROR = 1e-3


def float32(job: dict[str, Any], found: Finding) -> None:
    """Greedy ids and log-probabilities of a pool in float32."""
    settings: dict[str, Any] = options(small=job["small"]) | {"dtype": "float32"}
    with (
        jax.default_matmul_precision("highest"),
        EnginePool(job["model"], devices=1, warmup="none", **settings) as pool,
    ):
        errors, wrong = compared(job, pool)
        found.seen["matmul_precision"] = pool.stats()["engines"][0]["matmul_precision"]
    found.seen |= {"outputs": len(_prompts(job)), "wrong": wrong}
    found.seen |= {"tokens": len(errors), "largest_error": float(max(errors))}
    found.expect(not wrong, f"{wrong} outputs are not the reference's")
    found.expect(
        max(errors) <= _LARGEST_ERROR,
        f"a log-probability is {max(errors):.2g} off; {_LARGEST_ERROR:g} is allowed",
    )


def compared(job: dict[str, Any], pool: EnginePool) -> tuple[np.ndarray, int]:
    """How far each log-probability of greedy outputs is from the reference's for the same ids, and
    how many outputs have an id that the reference would not choose."""
    prompts, count = _prompts(job), 12 if job["small"] else 48
    results = pool.generate_all(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
        return_logprob=True,
    )
    config, weights = read_model(Path(job["model"]))
    # On an engine's device beside the engine's weights, as a trainer's weights are.
    weights = jax.device_put(weights, jax.devices()[0])
    reference = jax.jit(partial(_reference, config, count))
    errors, wrong = [], 0
    longest = max(map(len, prompts)) + count
    for prompt, result in zip(prompts, results, strict=True):
        ids = result["output_ids"]
        padded = np.zeros(longest, np.int32)
        padded[: len(prompt) + count] = [*prompt, *ids]
        own, best, gaps = map(np.asarray, reference(weights, padded, len(prompt)))
        ties = np.flatnonzero(gaps < _TIE)
        until = int(ties[0]) if len(ties) else count
        wrong += list(best[:until]) != list(ids[:until])
        given = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        errors += list(np.abs(own - given))
    return np.array(errors), wrong


def _reference(
    config: dict[str, Any], count: int, weights: Any, ids: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For `count` ids from `start` on: their log-probabilities, the best ids, and by how much these
    are better than the second best."""
    logits = forward(config, weights, ids[None])[0]
    logits = jax.lax.dynamic_slice_in_dim(logits, start - 1, count)
    chosen = jax.lax.dynamic_slice_in_dim(ids, start, count)
    logprobs = jax.nn.log_softmax(logits)
    (first, second), (best, _) = (part.T for part in jax.lax.top_k(logits, 2))
    return jnp.take_along_axis(logprobs, chosen[:, None], 1)[:, 0], best, first - second


def _prompts(job: dict[str, Any]) -> list[list[int]]:
    rng = random.Random(3)
    lengths = _SMALL_LENGTHS if job["small"] else _LENGTHS
    return [[rng.randrange(200) for _ in range(length)] for length in lengths]
