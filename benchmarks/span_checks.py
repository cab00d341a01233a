"""Checks outputs against their weight versions. Tokens are compared with a plain JAX forward pass
along the output (teacher forcing)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.synthetic import read_model
from enginepool.toy.model import forward

ROWS = 16
SHAPE = ROWS, 64  # few shapes, few compilations
# Where the best two logits are closer than this, either token is right: rounding decides.
NEAR_TIE = 1e-3


@dataclass(frozen=True, eq=False)
class Finished:
    """A request and its result."""

    prompt: list[int]
    result: dict[str, Any]

    @property
    def output(self) -> list[int]:
        return self.result["output_ids"]

    @property
    def spans(self) -> list[list[Any]]:
        return self.result["meta_info"]["weight_versions"]

    @property
    def adapter(self) -> str | None:
        return self.result["meta_info"].get("lora_path")

    @property
    def lora_spans(self) -> list[list[Any]]:
        """The spans of its adapter's versions. The version None is the base."""
        spans = self.result["meta_info"].get("lora_versions")
        return [[0, len(self.output), None]] if spans is None else spans

    @property
    def pieces(self) -> list[tuple[int, int, int, int | None]]:
        """Ranges of tokens, each with its version of the weights and of the adapter."""
        return [
            (max(start, first), min(end, last), version, adapter)
            for start, end, version in self.spans
            for first, last, adapter in self.lora_spans
            if max(start, first) < min(end, last)
        ]

    @property
    def reason(self) -> dict[str, Any]:
        return self.result["meta_info"]["finish_reason"]

    def __str__(self) -> str:
        return f"request {self.result['meta_info']['id']}"


@dataclass
class Compared:
    """Tokens that were compared with the reference.

    Attributes:
        tokens: How many.
        ties: How many were not compared, because either of two is right.
    """

    tokens: int = 0
    ties: int = 0
    violations: list[str] = field(default_factory=list)


def check_spans(finished: Finished) -> list[str]:
    """What is wrong with spans: they cover the output without gap or overlap, and versions rise."""
    found = _check_spans(finished, finished.spans)
    if finished.adapter is not None:
        found += _check_spans(finished, finished.lora_spans)
    if (count := finished.result["meta_info"]["completion_tokens"]) != len(finished.output):
        found.append(f"{finished}: completion_tokens={count}, and {len(finished.output)} tokens")
    return found


def _check_spans(finished: Finished, spans: list[list[Any]]) -> list[str]:
    found, length = [], len(finished.output)
    edges = [0, *(end for _, end, _ in spans)]
    if [start for start, _, _ in spans] != edges[:-1] or edges[-1] != length:
        found.append(f"{finished}: spans {spans} do not cover its {length} tokens")
    if any(end <= start for start, end, _ in spans):
        found.append(f"{finished}: an empty span in {spans}")
    versions = [version for *_, version in spans]
    if any(late <= early for early, late in itertools.pairwise(versions)):
        found.append(f"{finished}: versions do not rise in {spans}")
    return found


def check_tokens(
    outputs: Sequence[Finished],
    model_of: Callable[[int, int | None], Path],
    shape: tuple[int, int] = SHAPE,
) -> Compared:
    """Whether every token is the best one after those before it, by the weights of its span.

    Args:
        model_of: The weights that a version and a version of an adapter make.
        shape: The reference computes `shape[0]` outputs at a time. It pads them to a multiple of
            `shape[1]` tokens.
    """
    compared = Compared()
    by_model: dict[Path, dict[Finished, list[range]]] = {}
    for finished in outputs:
        for start, end, version, adapter in finished.pieces:
            mine = by_model.setdefault(model_of(version, adapter), {})
            mine.setdefault(finished, []).append(range(start, end))
    for model, mine in by_model.items():
        for block in itertools.batched(mine, shape[0]):
            for finished, logits in zip(block, output_logits(model, block, shape), strict=True):
                for steps in mine[finished]:
                    _compare(finished, logits, steps, model, compared)
    return compared


def _compare(
    finished: Finished, logits: np.ndarray, steps: range, model: Path, compared: Compared
) -> None:
    for step in steps:
        second, best = np.partition(logits[step], -2)[-2:]
        if best - second < NEAR_TIE:
            compared.ties += 1
            continue
        compared.tokens += 1
        if finished.output[step] != (expected := int(logits[step].argmax())):
            compared.violations.append(
                f"{finished}: token {step} is {finished.output[step]}, {model.name} gives "
                f"{expected} by {best - second:.4f}; spans {finished.spans}, {finished.lora_spans}"
            )
            return  # later tokens of this span depend on this one


def output_logits(
    model: Path, block: Sequence[Finished], shape: tuple[int, int] = SHAPE
) -> list[np.ndarray]:
    """The reference's logits for each output token of these requests.

    Args:
        shape: See `check_tokens`.
    """
    rows, pad_to = shape
    longest = max(len(finished.prompt) + len(finished.output) for finished in block)
    ids = np.zeros((rows, -(-longest // pad_to) * pad_to), np.int32)
    for row, finished in enumerate(block):
        sequence = finished.prompt + finished.output
        ids[row, : len(sequence)] = sequence
    compiled, params = _reference(model)
    logits = np.asarray(compiled(params, ids))
    return [
        logits[row, len(f.prompt) - 1 : len(f.prompt) + len(f.output) - 1]
        for row, f in enumerate(block)
    ]


def output_logprobs(
    model: Path, block: Sequence[Finished], shape: tuple[int, int] = SHAPE
) -> list[np.ndarray]:
    """The reference's log-probabilities of the output tokens of these requests."""
    return [
        np.asarray(jax.nn.log_softmax(rows))[np.arange(len(rows)), finished.output]
        for finished, rows in zip(block, output_logits(model, block, shape), strict=True)
    ]


@functools.cache
def _reference(model: Path) -> tuple[Any, dict[str, jax.Array]]:
    config, params = read_model(model)
    return jax.jit(functools.partial(forward, config)), jax.device_put(params)
