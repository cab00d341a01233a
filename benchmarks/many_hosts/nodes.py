"""A Ray cluster of two nodes in this machine, and the pools that these programs put on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# In the actors and whatever else Ray starts.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
# Few shapes and little KV: a pool opens in seconds.
POOL: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 512,
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 64,
    "precompile_token_paddings": [64],
    "precompile_bs_paddings": [4],
}
STEP_VARIABLE = "SIMULATED_STEP_MS"


@contextmanager
def two_nodes(cpus: int = 1, store: int = 200 << 20) -> Iterator[str]:
    """Its address; this process is connected to it, as `ray.init` is the user's.

    Args:
        store: Bytes of each node's object store.
    """
    import ray  # pyright: ignore[reportMissingImports]
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    nodes = Cluster()
    handler = signal.getsignal(signal.SIGTERM)  # Ray takes it over
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=cpus, object_store_memory=store, include_dashboard=False)
        everywhere = {
            "env_vars": ENVIRONMENT,
            "worker_process_setup_hook": "benchmarks.many_hosts.nodes.simulate",
        }
        ray.init(address=nodes.address, runtime_env=everywhere, log_to_driver=False)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()
        signal.signal(signal.SIGTERM, handler)


def simulate() -> None:
    """In a process that Ray starts: give steps their time, if this one was asked to."""
    if step := os.environ.get(STEP_VARIABLE):
        from benchmarks import simulated

        simulated.install(hollow=True).reset(float(step) / 1000)
