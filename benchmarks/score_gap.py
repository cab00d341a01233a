"""How far scores are from the log-probabilities of the same tokens when they were sampled.

    python -m benchmarks.score_gap
    python -m benchmarks.score_gap --kernel --prompts 4 --tokens 16

One engine has the toy. It samples `--tokens` tokens for each of `--prompts` prompts in one batch,
and again one prompt at a time. Then it scores them, together and one at a time. A trainer computes
the same log-probabilities: with the engine's forward (`EnginePool.forward_function`), and in plain
JAX, which computes in float32. The table has the mean and the largest difference of a
log-probability, and the share that is equal to the last bit. Two batches sample the same tokens up
to the first that differs.

With `--kernel` attention is the TPU's kernel, in an interpreter on CPU. That takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command import arguments, plain, write_json
from enginepool import EnginePool, toy
from enginepool.toy.files import read_checkpoint
from enginepool.toy.model import forward as plain_forward

_SUMS = list(product((1, 12, 77, 30), (3, 40, 55, 8)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("score_gap", __doc__)
    add = parser.add_argument
    add("--dtype", nargs="+", default=["float32", "bfloat16"])
    add("--prompts", type=int, default=12, help=f"at most {len(_SUMS)}; default: 12")
    add("--tokens", type=int, default=32, help="of an output; default: 32")
    add("--kernel", action="store_true", help="the TPU's attention kernel, interpreted")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = [row for dtype in args.dtype for row in _measure(dtype, args)]
    write_json(args, rows=rows)
    plain(
        ["dtype", "", "mean", "largest", "equal", "tokens"],
        [
            [
                *(row["dtype"], row["name"], f"{row['mean']:.1e}", f"{row['largest']:.1e}"),
                *(f"{100 * row['equal']:.0f} %", row["tokens"]),
            ]
            for row in rows
        ],
    )
    return 0


def _measure(dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = [list(f"{a}+{b}=".encode()) for a, b in _SUMS[: args.prompts]]
    params = {"temperature": 1.0, "max_new_tokens": args.tokens, "ignore_eos": True}
    params["sampling_seed"] = 1
    with _attention(args) as options, EnginePool(devices=1, **options | {"dtype": dtype}) as pool:

        def sample(chosen: list[int]) -> list[Any]:
            return pool.generate_all(
                None, params, input_ids=[prompts[i] for i in chosen], prompt_indices=chosen,
                return_logprob=True,
            )  # fmt: skip

        def score(chosen: list[int], results: list[Any]) -> list[Any]:
            ids = [results[i]["output_ids"] for i in chosen]
            made: Any = pool.score(
                input_ids=[prompts[i] for i in chosen], continuation_ids=ids, raise_on_error=True
            )
            return [one["logprobs"] for one in made]

        every = list(range(len(prompts)))
        together = sample(every)
        alone = [result for i in every for result in sample([i])]
        scores = score(every, together)
        scores_alone = [values for i in every for values in score([i], together)]
        alone_scores_alone = [values for i in every for values in score([i], alone)]
        exported, plain_jax = (
            _trainers(forward, params, prompts, together)
            for forward, params in _forwards(pool, dtype)
        )
    lengths = [_common(*pair) for pair in zip(together, alone, strict=True)]
    pairs = {
        "scored together, sampled together": (scores, _values(together)),
        "scored alone, sampled alone": (alone_scores_alone, _values(alone)),
        "sampled alone, sampled together": (
            _cut(_values(alone), lengths), _cut(_values(together), lengths),
        ),
        "scored alone, scored together": (scores_alone, scores),
        "engine's forward in a trainer, sampled together": (exported, _values(together)),
        "plain JAX in a trainer, sampled together": (plain_jax, _values(together)),
    }  # fmt: skip
    return [{"dtype": dtype, "name": name} | _gap(*pair) for name, pair in pairs.items()]


def _forwards(pool: EnginePool, dtype: str) -> list[tuple[Any, Any]]:
    """A trainer's forwards, each with parameters: the engine's, and plain JAX's."""
    config, stored = read_checkpoint(toy.checkpoint())
    params = {name: jnp.asarray(value, jnp.float32) for name, value in stored.items()}
    rounded = {name: value.astype(dtype) for name, value in params.items()}
    return [(pool.forward_function(), params), (jax.jit(partial(plain_forward, config)), rounded)]


def _trainers(forward: Any, params: Any, prompts: Any, results: Any) -> list[list[float]]:
    rows = [[*prompt, *one["output_ids"]] for prompt, one in zip(prompts, results, strict=True)]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    every = np.asarray(jax.nn.log_softmax(forward(params, ids).astype(jnp.float32)))
    return [
        every[index, np.arange(len(prompt) - 1, len(row) - 1), row[len(prompt) :]].tolist()
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def _attention(args: argparse.Namespace) -> Any:
    """Gives the pool's options."""
    if not args.kernel:
        return nullcontext({"warmup": "none"})
    from tests.support.interpreter import flash_attention
    from tests.support.pools import SMALL

    @contextmanager
    def kernel() -> Iterator[dict[str, Any]]:
        with flash_attention():
            yield {**SMALL, "attention_backend": "fa", "page_size": 16, "warmup": "none"}

    return kernel()


def _values(results: Sequence[Any]) -> list[list[float]]:
    return [[v for v, *_ in one["meta_info"]["output_token_logprobs"]] for one in results]


def _common(one: Any, other: Any) -> int:
    """How many first tokens two outputs have in common."""
    same = np.equal(one["output_ids"], other["output_ids"])
    return len(same) if same.all() else int(np.argmin(same))


def _cut(values: Sequence[list[float]], lengths: Sequence[int]) -> list[list[float]]:
    return [one[:length] for one, length in zip(values, lengths, strict=True)]


def _gap(some: Sequence[list[float]], others: Sequence[list[float]]) -> dict[str, Any]:
    one, other = (
        np.concatenate([np.asarray(value, np.float32) for value in values])
        for values in (some, others)
    )
    gaps = np.abs(one - other)
    equal = float(np.mean(one == other))
    return {
        "mean": float(gaps.mean()), "largest": float(gaps.max()), "equal": equal,
        "tokens": len(gaps),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
