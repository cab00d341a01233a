"""A pool as a rollout engine of Tunix.

    ClusterConfig(rollout_engine=functools.partial(EnginePoolRollout, pool_args={…}), …)

It is an adapter and uses the public API only. It needs the extra `tunix`.
"""

from enginepool.tunix.rollout import EnginePoolRollout

__all__ = ["EnginePoolRollout"]
