"""A Ray cluster of two nodes in this machine, with small object stores."""

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
_STORE = 200 << 20


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[str]:
    """Its address; this process is connected to it, as `ray.init` is the user's."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    handler = signal.getsignal(signal.SIGTERM)  # Ray takes it over
    try:
        for _ in range(2):
            options: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": _STORE}
            nodes.add_node(**options, include_dashboard=False)
        ray.init(address=nodes.address, runtime_env={"env_vars": ENVIRONMENT})
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()
        signal.signal(signal.SIGTERM, handler)
