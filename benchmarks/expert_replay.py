"""How far a trainer is from the engines on a mixture of experts, with and without replay.

    python -m benchmarks.expert_replay

A small Qwen3-MoE of random weights, in bfloat16, samples outputs with their experts. The trainer is
plain JAX, in bfloat16 too. It computes the log-probabilities of the same tokens twice: routed as it
chooses itself, and routed as the engine did.

"Routed otherwise" is the share of tokens that the trainer routes to other experts in some layer.
The gaps are the mean and the largest difference of a log-probability.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
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
        found = _compare(model, prompts, _sample(model, prompts, args.tokens), args.layers)
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


def _sample(model: Path, prompts: Sequence[list[int]], tokens: int) -> list[dict[str, Any]]:
    options = {**SMALL, "dtype": "bfloat16", "moe_backend": "epmoe", "warmup": "none"}
    params = {"temperature": 1.0, "sampling_seed": 1, "max_new_tokens": tokens, "ignore_eos": True}
    with EnginePool(str(model), devices=1, enable_return_routed_experts=True, **options) as pool:
        return pool.generate_all(
            None, params, input_ids=prompts, return_logprob=True, return_routed_experts=True
        )


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
