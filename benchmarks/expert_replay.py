"""How far a trainer is from the engines on a mixture of experts, with and without replay.

    python -m benchmarks.expert_replay

A small Qwen3-MoE of random weights, in bfloat16, samples outputs with their experts. The trainer is
plain JAX, in bfloat16 too. It computes the log-probabilities of the same tokens twice: routed as it
chooses itself, and routed as the engine did.

"Routed otherwise" is the share of tokens that the trainer routes to other experts in some layer.
The gaps are the mean and the largest difference of a log-probability.

"Throughput" is that of a pool whose requests all return their experts, over that of a pool without
the option. The two take turns; the figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command import arguments, plain, write_json
from enginepool import EnginePool
from enginepool.toy.files import read_checkpoint
from scripts.train_toy.checkpoint import write_checkpoint
from tests.support.families import parameter_shapes, routed_forward
from tests.support.pools import SMALL
from tests.support.reference import bfloat16, random_config

_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
_PROMPT, _LONGEST = 59, 128  # tokens


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("expert_replay", __doc__)
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--prompts", type=int, default=24)
    add("--tokens", type=int, default=64, help="of an output; default: 64")
    add("--rounds", type=int, default=5, help="rounds of the throughput's measurement")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not 1 <= args.tokens <= (most := _LONGEST - _PROMPT):
        raise SystemExit(f"--tokens {args.tokens}: expected 1 to {most}")
    with tempfile.TemporaryDirectory(prefix="expert-replay-") as folder:
        model = _write(Path(folder), args.layers)
        rng = np.random.default_rng(1)
        lengths = rng.integers(1, _PROMPT + 1, args.prompts)
        prompts = [rng.integers(0, 256, length).tolist() for length in lengths]
        with _pool(model, enable_return_routed_experts=True) as pool:
            results = _sample(pool, prompts, args.tokens)
            found = _compare(model, prompts, results, args.layers)
            with _pool(model) as without:
                found["throughput"] = _throughput(pool, without, prompts, args)
    write_json(args, **found)
    plain(
        ["trainer", "routed otherwise", "mean gap", "largest gap"],
        [
            [name, share, f"{gaps['mean']:.4f}", f"{gaps['largest']:.3f}"]
            for name, share, gaps in (
                ("its own experts", f"{100 * found['routed_otherwise']:.1f} %", found["own"]),
                ("the engine's experts", "", found["replayed"]),
            )
        ],
    )
    print(f"throughput with experts: {100 * found['throughput']:.0f} %")
    return 0


def _write(folder: Path, layers: int) -> Path:
    config = random_config("qwen3_moe", layers, 2, 1, bfloat16()) | _EXPERTS
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(float(name.endswith("norm.weight")), 0.08, shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    write_checkpoint(folder, params, config, bfloat16())
    return folder


def _pool(model: Path, **options: Any) -> EnginePool:
    options |= {**SMALL, "dtype": "bfloat16", "moe_backend": "epmoe"}
    return EnginePool(str(model), devices=1, **options)


def _sample(
    pool: EnginePool, prompts: Sequence[list[int]], tokens: int, *, experts: bool = True
) -> list[dict[str, Any]]:
    params = {"temperature": 1.0, "sampling_seed": 1, "max_new_tokens": tokens, "ignore_eos": True}
    return pool.generate_all(
        None, params, input_ids=prompts, return_logprob=True, return_routed_experts=experts
    )


def _throughput(
    pool: EnginePool, without: EnginePool, prompts: Sequence[list[int]], args: argparse.Namespace
) -> float:
    def seconds(of: EnginePool) -> float:
        of.flush_cache()
        began = time.perf_counter()
        _sample(of, prompts, args.tokens, experts=of is pool)
        return time.perf_counter() - began

    seconds(without)  # warms it up
    return statistics.median(seconds(without) / seconds(pool) for _ in range(args.rounds))


def _compare(
    model: Path, prompts: Sequence[list[int]], results: Sequence[dict[str, Any]], layers: int
) -> dict[str, Any]:
    config, stored = read_checkpoint(model)
    params = {name: jnp.asarray(value, jnp.bfloat16) for name, value in stored.items()}
    forward = jax.jit(partial(routed_forward, config))
    otherwise, own_gaps, replayed_gaps = [], [], []
    for prompt, result in zip(prompts, results, strict=True):
        output, meta = result["output_ids"], result["meta_info"]
        count = len(prompt) + len(output) - 1
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        ids = np.zeros((1, _LONGEST), np.int32)
        ids[0, :count] = [*prompt, *output][:-1]
        experts = np.zeros((1, _LONGEST, layers, _EXPERTS["num_experts_per_tok"]), np.int32)
        experts[0, :count] = flat.reshape(count, *experts.shape[2:])
        own, chosen = forward(params, ids)
        replayed, _ = forward(params, ids, experts)
        pair = (np.sort(np.asarray(one)[0, :count], axis=-1) for one in (chosen, experts))
        otherwise.append(np.not_equal(*pair).any(axis=(1, 2)))
        sampled = np.array([value for value, *_ in meta["output_token_logprobs"]])
        for gaps, logits in ((own_gaps, own), (replayed_gaps, replayed)):
            law = jax.nn.log_softmax(logits[0, len(prompt) - 1 : count].astype(jnp.float32))
            gaps.append(np.abs(np.asarray(law)[np.arange(len(output)), output] - sampled))
    return {
        "routed_otherwise": float(np.concatenate(otherwise).mean()),
        "own": _gap(own_gaps),
        "replayed": _gap(replayed_gaps),
    }


def _gap(gaps: Sequence[np.ndarray]) -> dict[str, float]:
    every = np.concatenate(gaps)
    return {"mean": float(every.mean()), "largest": float(every.max())}


if __name__ == "__main__":
    sys.exit(main())
