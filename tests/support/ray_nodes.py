"""A Ray cluster of two nodes on this machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# In the actors and whatever else Ray starts.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
_STORE_BYTES = 200 << 20  # of each node


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[str]:
    """Its address. This process is connected to it: `ray.init` is the user's."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    handler = signal.getsignal(signal.SIGTERM)  # Ray takes it over
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES, include_dashboard=False)
        everywhere = {"env_vars": ENVIRONMENT}
        ray.init(address=nodes.address, runtime_env=everywhere, log_to_driver=False)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()
        signal.signal(signal.SIGTERM, handler)
