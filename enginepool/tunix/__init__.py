"""A pool as a rollout engine of Tunix, in whose RL cluster it stands where its own samplers do.

    ClusterConfig(rollout_engine=functools.partial(EnginePoolRollout, pool_args={…}), …)

An adapter: it uses what every user of the package can. Needs the extra `tunix`.
"""

from enginepool.tunix.rollout import EnginePoolRollout

__all__ = ["EnginePoolRollout"]
