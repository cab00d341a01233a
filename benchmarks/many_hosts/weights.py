"""New weights to two hosts by phase, beside a plain `ray.put` and `ray.get` of the same bytes."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.many_hosts.nodes import POOL, two_nodes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)


def run(given: argparse.Namespace) -> bool:
    from benchmarks.synthetic import sized_config, tensors, weight_bytes, write_model
    from enginepool.ray import RayEnginePool

    config = sized_config(given.gb * 1e9, "bfloat16")
    nbytes = weight_bytes(config)
    with tempfile.TemporaryDirectory(prefix="many-hosts-") as folder:
        path = write_model(Path(folder, "model"), config)
        # Two versions of the arrays lie in a node's store at a time: the old one is kept until
        # the new one is committed.
        with two_nodes(cpus=2, store=int(2.5 * nbytes) + (200 << 20)):
            arrays = dict(tensors(path))
            print(f"{nbytes / 1e9:.2f} GB in {len(arrays)} arrays, bfloat16", flush=True)
            _show("ray.put, ray.get", [_plain(arrays) for _ in range(given.rounds)])
            options: dict[str, Any] = {"devices_per_host": 1, "warmup": "none", **POOL}
            options["dtype"] = "bfloat16"
            with RayEnginePool(str(path), hosts=2, **options) as pool:
                before = pool.checksum()
                for name, source in (("arrays", arrays), ("path", str(path))):
                    runs = [pool.update_weights(source).seconds for _ in range(given.rounds)]
                    _show(f"update_weights from {name}", runs)
                return pool.checksum() == before


def _plain(arrays: dict[str, Any]) -> dict[str, float]:
    """What Ray itself takes: the bytes into the store, and at every node at the same time out of
    it, each array looked at once."""
    import ray  # pyright: ignore[reportMissingImports]

    from enginepool.ray.wire import pack_tree

    class Node:
        def ready(self) -> None:
            """Its process is there."""

        def get(self, source: Any) -> int:
            return sum(int(one.array.reshape(-1)[0]) for one in source.values())

    actor: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Node)
    nodes: list[Any] = [actor.remote() for _ in range(2)]
    ray.get([node.ready.remote() for node in nodes])
    started = time.perf_counter()
    source = ray.put(pack_tree(arrays))
    put = time.perf_counter()
    ray.get([node.get.remote(source) for node in nodes])
    ended = time.perf_counter()
    for node in nodes:
        ray.kill(node)
    return {"put": put - started, "get": ended - put, "total": ended - started}


def _show(name: str, runs: list[dict[str, float]]) -> None:
    phases = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    said = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    print(f"{name}: {said}", flush=True)
