"""A trainer in two JAX processes on CPU, a pool in each: new weights from global arrays, after the
trainer's own gather. No Ray: a slice of several hosts in one JAX program."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

from benchmarks.many_hosts.nodes import POOL

_SUMS = ["12+7=", "30+4=", "55-21=", "81-9="]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=400.0, help="until both have to be done")
    parser.add_argument("--process", type=int, nargs=2, metavar=("INDEX", "PORT"),
                        help=argparse.SUPPRESS)  # fmt: skip


def run(given: argparse.Namespace) -> bool:
    if given.process is not None:
        return _process(*given.process)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.many_hosts", "processes"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    both = [
        subprocess.Popen([*command, "--process", str(index), str(port)], env=environment)
        for index in range(2)
    ]
    try:
        return not any(one.wait(given.seconds) for one in both)
    finally:
        for one in both:
            one.kill()


def _process(index: int, port: int) -> bool:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.synthetic import tensors
    from enginepool import EnginePool, InvalidWeights, toy

    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("hosts", "fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def over_all(value: np.ndarray) -> jax.Array:
        cut = PartitionSpec(("hosts", "fsdp")) if value.ndim > 1 else PartitionSpec()
        where = NamedSharding(mesh, cut)
        return jax.make_array_from_callback(value.shape, where, lambda part: value[part])

    subtract = toy.checkpoint("subtract")
    with EnginePool(str(subtract), devices=1, warmup="none", **POOL) as other:
        wanted = other.checksum()
    with EnginePool(**POOL) as pool:
        trainer = {name: over_all(value) for name, value in tensors(subtract)}
        try:
            pool.update_weights(trainer)
        except InvalidWeights as error:
            print(f"process {index}: cut over processes: {str(error)[:100]} …", flush=True)
        gathered = jax.jit(lambda tree: tree, out_shardings=everywhere)(trainer)  # by all
        report = pool.update_weights(gathered, weight_version="trained")
        results: list[dict[str, Any]] = pool.generate_all(_SUMS[index:], {"temperature": 0.0})
        versions = {result["meta_info"]["weight_version"] for result in results}
        good = pool.checksum() == wanted and versions == {"trained"}
        print(
            f"process {index} of {jax.process_count()}: engines {len(report.engines)}, "
            f"{[result['text'] for result in results]}, the trainer's weights: {good}",
            flush=True,
        )
        # JAX ends a process whose sibling is gone.
        multihost_utils.sync_global_devices("before the pools close")
    return good
