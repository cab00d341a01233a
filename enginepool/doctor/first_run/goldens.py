"""The toy's sums, which every engine must answer: alone, and while the others work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from enginepool import toy
from enginepool.doctor.first_run.checklist import Finding, describe
from enginepool.doctor.first_run.compilations import counted
from enginepool.toy.files import END_ID, read_checkpoint
from enginepool.toy.model import forward

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool

# For these sums the best logit of both checkpoints is at least 6 above the next (float32). No
# accelerator's rounding can change an answer.
SUMS = ((89, 43), (79, 44), (19, 83), (73, 38), (28, 3), (6, 90), (51, 47), (4, 99))
PROMPTS = [f"{a}+{b}=" for a, b in SUMS]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
# The timeout of a call that should take well under a second.
CALL_SECONDS = 60.0
# How many times each engine is asked all sums while the others work.
ROUNDS = 4
# Long enough to fill a page of 128 and begin another.
LONG_TOKENS = 160
# The logit of the engine's choice may be this far below the best logit of plain JAX. An accelerator
# multiplies float32 in a shorter format. Once the toy has answered, its best logits are close to
# each other. A wrong page or position gives a gap of several units.
LARGEST_GAP = 1.0


def expected(name: str = "add") -> list[list[int]]:
    """The ids of a checkpoint's answers, end token included."""
    answers = [a + b if name == "add" else a - b for a, b in SUMS]
    return [[*str(answer).encode(), END_ID] for answer in answers]


def differing(results: list[dict[str, Any]], name: str = "add") -> list[str]:
    """The answers that differ from the checkpoint's. `results` has all sums once or more often."""
    wanted = expected(name)
    return [
        f"{PROMPTS[i % len(SUMS)]} gave {result['output_ids']} (engine "
        f"{result['meta_info']['engine_index']}, {result['meta_info']['finish_reason']}), "
        f"not {wanted[i % len(SUMS)]}"
        for i, result in enumerate(results)
        if result["output_ids"] != wanted[i % len(SUMS)]
    ]


def serving(pool: EnginePool) -> list[int]:
    return [e["engine_index"] for e in pool.stats()["engines"] if e["state"] == "serving"]


def missing(pool: EnginePool, took_part: set[int]) -> list[str]:
    """The engines that did not take part, and why."""
    return [
        f"engine {engine['engine_index']} took no part: {engine['state']}, {engine['reason']}"
        for engine in pool.stats()["engines"]
        if engine["engine_index"] not in took_part
    ]


def alone(pool: EnginePool, found: Finding) -> None:
    """Every engine answers all sums while the others have nothing to do."""
    by_engine = found.seen["engines"] = []
    for index, engine in enumerate(pool.engines):
        entry: dict[str, Any] = {"engine_index": index}
        by_engine.append(entry)
        try:
            with counted() as programs:
                results = engine.generate(PROMPTS, GREEDY)
        except Exception as error:  # the other engines are asked all the same
            entry["error"] = describe(error)
            found.problems.append(f"engine {index}: {entry['error']}")
            continue
        wrong = differing(results)
        entry |= {"right": len(results) - len(wrong), "of": len(results), "compiled": len(programs)}
        found.problems += wrong
        found.expect(not programs, f"engine {index} compiled {len(programs)} programs to serve")


def together(pool: EnginePool, found: Finding) -> None:
    """All engines answer all sums at once, in full batches."""
    count = len(pool.engines) * ROUNDS
    with counted() as programs:
        results = pool.generate_all(PROMPTS * count, GREEDY, timeout=CALL_SECONDS)
    wrong = differing(results)
    shares = [0] * len(pool.engines)
    for result in results:
        if (index := result["meta_info"]["engine_index"]) is not None:
            shares[index] += 1
    found.seen |= {"right": len(results) - len(wrong), "of": len(results)}
    found.seen |= {"by_engine": shares, "compiled": len(programs)}
    found.problems += wrong[: len(SUMS)]
    found.expect(not programs, f"{len(programs)} programs were compiled to serve")
    found.problems += missing(pool, {i for i, share in enumerate(shares) if share})


def long(pool: EnginePool, found: Finding) -> None:
    """One long output past a page, compared with plain JAX without a cache, pages or kernels."""
    params = {**GREEDY, "max_new_tokens": LONG_TOKENS, "ignore_eos": True}
    (result,) = pool.generate_all(PROMPTS[:1], params, timeout=CALL_SECONDS)
    ids, prompt = result["output_ids"], list(PROMPTS[0].encode())
    found.expect(len(ids) == LONG_TOKENS, f"{len(ids)} tokens of {LONG_TOKENS}")
    config, weights = read_checkpoint(toy.checkpoint())
    sequence = np.array([prompt + ids], np.int32)
    logits = np.asarray(jax.jit(partial(forward, config))(weights, sequence))[0]
    before = logits[len(prompt) - 1 : -1]  # the logits from which each id was chosen
    gaps = before.max(axis=-1) - before[np.arange(len(ids)), ids]
    found.seen |= {
        "tokens": len(ids),
        "not_the_references_best": int((gaps > 0).sum()),
        "largest_gap": round(float(gaps.max()), 4),
    }
    at = int(gaps.argmax())
    found.expect(
        bool(gaps.max() <= LARGEST_GAP),
        f"token {at} is {gaps[at]:.2f} below plain JAX's best logit; {LARGEST_GAP} is allowed",
    )
