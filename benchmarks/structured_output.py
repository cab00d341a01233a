"""What a grammar costs a decode step, on the toy.

    python -m benchmarks.structured_output

One engine decodes batches of one and of eight requests, of 128 tokens each. "Free" is a batch
without grammars, with several steps a launch as usual. In "beside", one request of the batch has a
grammar. The figures are medians of milliseconds a step, without the compilation of the grammar. The
forms take turns in every round, so that other work on the host meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import CORES, arguments, plain, write_json
from enginepool import EnginePool, toy

_TOKENS = 128
_FREE: dict[str, Any] = {"ignore_eos": True}
# Forms that cannot end before the last token.
_FORMS: dict[str, dict[str, Any]] = {
    "free": _FREE,
    "regex": {"regex": "[0-9a-f]{400}"},
    "json_schema": {"json_schema": {"type": "array", "minItems": 200, "items": {"enum": [7, "x"]}}},
    "ebnf": {"ebnf": 'root ::= "(" root ")" root | [a-z]{300}'},
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("structured_output", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    figures: dict[str, dict[int, float]] = {}
    options: dict[str, Any] = {"dtype": "float32", "precompile_bs_paddings": [1, 8]}
    with EnginePool(str(toy.checkpoint()), devices=1, max_total_tokens=2048, **options) as pool:
        for batch in (1, 8):
            for name, median in _medians(pool, batch, args.rounds).items():
                figures.setdefault(name, {})[batch] = median
    print(f"ms a step, {CORES} cores, medians of {args.rounds}")
    plain(
        ["", "batch 1", "batch 8"],
        [
            [name, *(f"{row[batch]:.2f}" if batch in row else "" for batch in (1, 8))]
            for name, row in figures.items()
        ],
    )
    write_json(args, figures=figures)
    return 0


def _medians(pool: EnginePool, batch: int, rounds: int) -> dict[str, float]:
    each = {name: [form] * batch for name, form in _FORMS.items()}
    if batch > 1:
        each["beside"] = [_FORMS["regex"], *[_FREE] * (batch - 1)]
    seconds: dict[str, list[float]] = {name: [] for name in each}
    for number in range(rounds + 1):
        for name, forms in each.items():
            taken = _decode(pool, forms)
            if number:  # the first compiles the grammars
                seconds[name].append(taken)
    return {name: statistics.median(values) * 1000 for name, values in seconds.items()}


def _decode(pool: EnginePool, forms: list[dict[str, Any]]) -> float:
    """Seconds a step."""
    prompts = [[65 + index] for index in range(len(forms))]
    params = [{"temperature": 0.0, "max_new_tokens": _TOKENS, **form} for form in forms]
    started = time.perf_counter()
    results = pool.generate_all(input_ids=prompts, sampling_params=params)
    taken = time.perf_counter() - started
    assert all(len(result["output_ids"]) == _TOKENS for result in results)
    return taken / _TOKENS


if __name__ == "__main__":
    raise SystemExit(main())
