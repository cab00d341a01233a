"""A Ray cluster of two nodes on this machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.xla import QUICK_TO_COMPILE

# For the actors and all other processes that Ray starts.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": QUICK_TO_COMPILE,
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
_STORE_BYTES = 200 << 20  # of each node


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[str]:
    """The cluster's address. This process is connected to it, because `ray.init` is the user's
    part."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
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
