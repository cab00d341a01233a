"""Prompts of mixed length on two hosts of two engines: one pool's ids, however they are split."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.many_hosts.nodes import POOL, two_nodes
from enginepool import EnginePool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)


def run(given: argparse.Namespace) -> bool:
    rng = random.Random(given.seed)
    prompts = [rng.choices(range(256), k=1 + int(rng.lognormvariate(2.5, 0.8)) % 200)
               for _ in range(given.prompts)]  # fmt: skip
    params = [_params(rng, index) for index in range(given.prompts)]
    with EnginePool(devices=2, **POOL) as pool:
        expected = _ids(_ask(pool, prompts, params, range(given.prompts)))
    print(f"one pool: {len(expected)} outputs of {sum(map(len, expected))} tokens", flush=True)
    from enginepool.ray import RayEnginePool

    good = True
    with two_nodes(), RayEnginePool(hosts=2, devices_per_host=2, **POOL) as pool:
        for name, parts in _splits(rng, given.prompts):
            with ThreadPoolExecutor(16) as callers:
                answers = callers.map(lambda part: _ask(pool, prompts, params, part), parts)
                results = [(part, answer) for part, answer in zip(parts, answers, strict=True)]
            ids: dict[int, list[int]] = {}
            hosts = {0: 0, 1: 0}
            for part, answer in results:
                indices = [result["meta_info"]["prompt_index"] for result in answer]
                good &= indices == list(part)  # in order
                ids |= zip(part, _ids(answer), strict=True)
                for result in answer:
                    hosts[result["meta_info"]["host_index"]] += 1
            wrong = [index for index in range(given.prompts) if ids[index] != expected[index]]
            good &= not wrong
            print(f"{name}: {len(wrong)} differ; outputs by host: {hosts}", flush=True)
    return good


def _splits(rng: random.Random, count: int) -> Iterator[tuple[str, list[Sequence[int]]]]:
    every = list(range(count))
    yield "in one call", [every]
    yield "in chunks of 16", [every[at : at + 16] for at in range(0, count, 16)]
    rng.shuffle(every)
    cuts = sorted(rng.sample(range(1, count), min(9, count - 1)))
    parts = zip([0, *cuts], [*cuts, count], strict=True)
    yield "shuffled and cut anywhere", [every[begin:end] for begin, end in parts]


def _params(rng: random.Random, index: int) -> dict[str, Any]:
    """Half greedy, half sampled with a seed that all of them share."""
    length = {"max_new_tokens": 1 + int(rng.lognormvariate(2.5, 0.8)) % 150, "ignore_eos": True}
    if index % 2:
        return {**length, "temperature": 0.0}
    return {**length, "temperature": 1.0, "sampling_seed": 7}


def _ask(pool: Any, prompts: Any, params: Any, part: Sequence[int]) -> list[dict[str, Any]]:
    return pool.generate_all(
        input_ids=[prompts[index] for index in part],
        sampling_params=[params[index] for index in part],
        prompt_indices=list(part),
    )


def _ids(results: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [result["output_ids"] for result in results]
