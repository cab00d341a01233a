"""The reference's logits along tokens that an engine has chosen, and a model with known answers.

To check an output against the logits along it takes one forward pass, and not one for each token.
For greedy outputs this proves the same as decoding with the reference: while every id is the
reference's best, the reference would have chosen the same.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from enginepool.toy.files import END_ID, read_checkpoint
from scripts.train_toy.checkpoint import write_checkpoint
from tests.support.families import forward
from tests.support.reference import PAD_TO, make_random_model, random_config
from tests.support.reference import _load as load_weights
from tests.support.reference import _stamp as stamp

ROWS = 16
# If the best two logits are closer than this, rounding decides, and either id is right.
NEAR_TIE = 1e-3
LOGPROB_TOLERANCE = 1e-4


def output_logits(
    model_dir: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """The reference's logits for each output token, [len(output), V] a prompt."""
    config_json, params = load_weights(Path(model_dir).resolve(), stamp(Path(model_dir)))
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    width = -(-longest // PAD_TO) * PAD_TO
    logits: list[np.ndarray] = []
    for start in range(0, len(prompts), ROWS):
        block = list(zip(prompts, outputs, strict=True))[start : start + ROWS]
        ids = np.zeros((ROWS, width), np.int32)
        for row, (prompt, output) in enumerate(block):
            ids[row, : len(prompt) + len(output)] = [*prompt, *output]
        of_block = np.asarray(_compiled(config_json)(params, ids))
        logits += [
            of_block[row, len(prompt) - 1 : len(prompt) + len(output) - 1]
            for row, (prompt, output) in enumerate(block)
        ]
    return logits


def logprobs(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log(softmax(logits / temperature)) of every row, in float64."""
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], results: Sequence[dict[str, Any]]
) -> int:
    """Every id is the reference's best, with its log-probability. Returns how many were compared.

    The comparison of a prompt ends at a near tie that was decided the other way.
    """
    logits = output_logits(model_dir, prompts, [result["output_ids"] for result in results])
    compared = 0
    for result, rows in zip(results, logits, strict=True):
        expected = logprobs(rows)
        values = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        assert [entry[1] for entry in result["meta_info"]["output_token_logprobs"]] == (
            result["output_ids"]
        )
        assert len(result["output_ids"]) == result["meta_info"]["completion_tokens"] == len(values)
        for step, token_id in enumerate(result["output_ids"]):
            behind = expected[step].max() - expected[step][token_id]
            where = f"prompt {result['meta_info']['prompt_index']}, step {step}"
            assert behind < NEAR_TIE, f"{where}: {token_id}, not {expected[step].argmax()}"
            assert abs(values[step] - expected[step][token_id]) < LOGPROB_TOLERANCE, where
            compared += 1
            if behind > 0:
                break
    return compared


# The outputs of the scripted model: after each of these characters, byte by byte, comes the next.
ROUND = ("0123456789", "你是谁🙂")  # for ever
LINE = "abcdefghijklmnopqrstuvwxyz"  # and then the end token


def write_scripted_model(model_dir: Path) -> Path:
    """Write a Llama that follows its script. Attention and MLP add nothing, and the output
    matrix maps each byte's embedding to the byte after it."""
    make_random_model(model_dir, "llama", seed=5, num_layers=1, num_heads=2)
    _, params = read_checkpoint(model_dir)
    params["model.norm.weight"] = np.ones_like(params["model.norm.weight"])
    for name, value in params.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            params[name] = np.zeros_like(value)
    embedding = params["model.embed_tokens.weight"]
    head = np.zeros_like(embedding)
    for first, second in _successors():
        head[second] += embedding[first]
    params["lm_head.weight"] = head
    write_checkpoint(model_dir, params, random_config("llama", 1, 2, 2, np.float32), np.float32)
    return model_dir


def _successors() -> list[tuple[int, int]]:
    pairs = list(pairwise(LINE.encode()))
    pairs.append((ord(LINE[-1]), END_ID))
    for text in ROUND:
        ids = text.encode()
        pairs += zip(ids, ids[1:] + ids[:1], strict=True)
    return pairs


@lru_cache(maxsize=16)
def _compiled(config_json: str) -> Any:
    config = json.loads(config_json)
    return jax.jit(lambda params, ids: forward(config, params, ids))
