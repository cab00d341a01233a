"""Offline batches with Ray Data: JSONL or Parquet in, the same format out, resumable.

    pip install -e '.[tpu,ray-data]'
    python examples/ray_data.py prompts.jsonl results --model Qwen/Qwen3-4B --hosts 4 \\
        --devices 4 --tpus 4 --sampling-params '{"max_new_tokens": 256, "temperature": 0.7}'

A row has `prompt`, and `id`, an integer that no other row has. Other columns are kept. Results are
the rows with `output`, `output_ids` and `finish_reason`, in the order in which they ended. Each
host has one actor with an `EnginePool`. Ray Data feeds it several batches at a time. If an actor
dies, Ray Data moves its batches and starts another one.

After any failure, the same command does the rows that are missing. `results.checkpoint` has the ids
whose results are written. Every host must see it and `results`. With a `sampling_seed`, the samples
of a row depend on the seed and the row's id alone, not on the number of hosts or starts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig


class Generate:
    """An actor of Ray Data. It has the pool of one host."""

    def __init__(self, pool_args: dict[str, Any], sampling_params: dict[str, Any] | None) -> None:
        from enginepool import EnginePool

        self._pool = EnginePool(**pool_args).open()
        self._sampling_params = sampling_params

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        results = await self._pool.async_generate_all(
            [str(prompt) for prompt in batch["prompt"]],
            self._sampling_params,
            prompt_indices=[int(one) for one in batch["id"]],
        )
        reasons = [result["meta_info"]["finish_reason"] for result in results]
        yield {
            **batch,
            "output": [result["text"] for result in results],
            "output_ids": [result["output_ids"] for result in results],
            "finish_reason": [reason.get("err_type") or reason["type"] for reason in reasons],
        }


def run(given: argparse.Namespace) -> None:
    source, output = map(_absolute, (given.input, given.output))
    DataContext.get_current().checkpoint_config = CheckpointConfig(
        "id",
        f"{output.rstrip('/')}.checkpoint",
        delete_checkpoint_on_success=False,  # a later start finds nothing to do, or new rows
    )
    # The checkpoint's filter needs Arrow. `read_json` with lines=True would give pandas.
    parquet = ".parquet" in source or given.parquet
    rows = ray.data.read_parquet(source) if parquet else ray.data.read_json(source)
    # Small blocks: a block is written as a whole, and an actor's death loses its unfinished blocks.
    rows = rows.repartition(target_num_rows_per_block=given.batch_size)
    results = rows.map_batches(
        Generate,
        fn_constructor_args=(_pool_args(given), given.sampling_params),
        batch_size=given.batch_size,
        compute=ActorPoolStrategy(size=given.hosts, max_tasks_in_flight_per_actor=given.in_flight),
        max_concurrency=given.in_flight,
        num_cpus=given.cpus,
        resources={"TPU": given.tpus} if given.tpus else None,
        max_restarts=-1,
    )
    if parquet:
        results.write_parquet(output)
    else:
        results.write_json(output)


def _absolute(path: str) -> str:
    """The absolute path, for hosts with other working directories. A bucket's URL stays."""
    return path if "://" in path else str(Path(path).resolve())


def _pool_args(given: argparse.Namespace) -> dict[str, Any]:
    return {"model": given.model, "devices": given.devices, **given.pool_args}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("input", help="a file or a directory of JSONL or Parquet")
    parser.add_argument("output", help="a directory")
    parser.add_argument("--parquet", action="store_true", help="a directory of Parquet, not JSONL")
    parser.add_argument("--model", help="default: the toy")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--devices", type=int, help="devices of each host; default: all")
    parser.add_argument("--tpus", type=float, help="chips that Ray is to hold for an actor")
    parser.add_argument("--cpus", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8, help="batches at a time on a host")
    parser.add_argument("--sampling-params", type=json.loads, help="JSON")
    parser.add_argument("--pool-args", type=json.loads, default={}, help="JSON for EnginePool")
    parser.add_argument("--address", help="a Ray cluster; default: RAY_ADDRESS, or this machine")
    given = parser.parse_args()
    if (n := (given.sampling_params or {}).get("n", 1)) != 1:
        parser.error(
            f"--sampling-params: n={n}: a row has one output. For more samples of a "
            "prompt, give one row per sample, each with its own id, and leave n out"
        )
    return given


if __name__ == "__main__":
    arguments = _parse()
    ray.init(address=arguments.address)
    run(arguments)
