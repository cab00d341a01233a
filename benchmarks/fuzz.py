"""Calls of every kind, with parameters of every kind. Every output is checked.

    python -m benchmarks.fuzz --outputs 2000 --page-size 16
    python -m benchmarks.fuzz --outputs 2000 --page-size 128 --tp-size 2 --engines 2 --seed 7

The calls have temperatures, top-k, top-p, min-p, penalties, `min_new_tokens`, grammars, samples,
stop ids and stop strings, seeds, shared prefixes, prompts in chunks, streams and scores. Many name
one of three adapters, for which there are two slots. Outputs that timed out or were aborted are
resumed from what they have. Requests join batches that decode.

Each output is compared with a plain JAX forward pass along it. Its tokens must be possible under
its parameters, and the best ones if it is greedy. Its log-probabilities must be those of the
reference within 1e-4. Its text and ids must end where a stop says so. Nothing is broken on purpose:
every exception and every engine that failed is a fault. Exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import arguments, plain, write_json
from benchmarks.fuzz_law import Law
from benchmarks.fuzz_load import CHUNK, ENDS, Load, fuzz_model
from benchmarks.micro_pool import ADAPTED, ADAPTERS, left_over, write_adapters
from benchmarks.soak_checks import FAILED
from benchmarks.span_checks import ROWS, output_logits, output_logprobs
from enginepool import EnginePool

_SLOTS = 16
_NEAR = 1e-4
_SHOWN = 20


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("fuzz", __doc__)
    add = parser.add_argument
    add("--outputs", type=int, default=2000)
    add("--page-size", type=int, default=1)
    add("--tp-size", type=int, default=1)
    add("--engines", type=int, default=1)
    add("--callers", type=int, default=8, help="threads that ask, for each engine; default: 8")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a pool that runs out of KV pages, and prefills longer prompts in chunks."""
    return {
        "dtype": "float32",
        "devices": args.engines * args.tp_size,
        "tp_size": args.tp_size,
        "page_size": args.page_size,
        "context_length": 512,
        "max_running_requests": _SLOTS,
        "max_total_tokens": 1536 if args.page_size == 1 else max(3072, 24 * args.page_size),
        "max_prefill_tokens": CHUNK,
        "chunked_prefill_size": CHUNK,
        "precompile_token_paddings": [64, CHUNK],
        "precompile_bs_paddings": [_SLOTS],
        **ADAPTED,
    }


def check(models: Mapping[str | None, Path], load: Load) -> list[str]:
    """What is wrong with the outputs and the scores, by the reference.

    Args:
        models: By adapter, the checkpoint with the adapter merged into the base.
    """
    law = Law(models[None], ENDS)
    found = list(load.faults)
    for adapter, model in models.items():
        asked = [one for one in load.asked if one.adapter == adapter]
        # Outputs of like length together: they are padded to the longest.
        asked.sort(key=lambda one: len(one.finished.prompt + one.finished.output))
        for block in itertools.batched(asked, ROWS):
            logits = output_logits(model, [one.finished for one in block])
            for one, rows in zip(block, logits, strict=True):
                found += law.faults(one.finished, one.params, rows)
                if one.finished.adapter != adapter:
                    found.append(f"{one.finished} is of {one.finished.adapter}, not of {adapter}")
        scored = [one for one in load.scored if one.adapter == adapter]
        for block in itertools.batched(scored, ROWS):
            for one, values in zip(block, output_logprobs(model, block), strict=True):
                if np.abs(np.array(one.result["logprobs"]) - values).max() > _NEAR:
                    found.append(f"a score after {one.prompt}: {one.result}, {values}")
    return found


def failures(events: Sequence[dict[str, Any]]) -> list[str]:
    """Engines that failed, even if their requests ended well."""
    return [f"an engine failed: {event}" for event in events if event["event"] in FAILED]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        model = fuzz_model(Path(folder) / "model", args.tp_size)
        models: dict[str | None, Path] = {None: model}
        with EnginePool(str(model), **options(args)) as pool:
            for name, adapter in zip(
                ADAPTERS, write_adapters(Path(folder), len(ADAPTERS), [model]), strict=True
            ):
                pool.load_lora_adapter(name, adapter)
                models[name] = adapter / "merged-0"
            load = Load(pool, args.seed)
            load.run(args.outputs, args.callers * args.engines)
            left = left_over(pool) + failures(pool.events())
        faults = check(models, load) + left
    faults += [f"raised {count} times: {error}" for error, count in load.exceptions.items()]
    finished = [one.finished for one in load.asked]
    report = {
        "outputs": len(finished),
        "of them with adapters": sum(one.adapter is not None for one in load.asked),
        "tokens": sum(len(one.output) for one in finished),
        "ended": dict(collections.Counter(one.reason["type"] for one in finished)),
        "outputs that went on from a part": load.resumed,
        "scores": len(load.scored),
        "calls": dict(load.calls),
        "faults": len(faults),
    }
    plain(["what", "how many"], [[name, str(value)] for name, value in report.items()])
    print("\n".join(fault[:600] for fault in faults[:_SHOWN]))
    write_json(args, **report | {"faults": faults})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
