"""A driver that is killed. It prints its hosts' process ids, and generates until it is killed.

Run by tests/integrations/test_ray_failures.py, with the address of a Ray cluster.
"""

import json
import sys

import ray

from enginepool.ray import RayEnginePool
from tests.support.pools import SMALL
from tests.support.ray_nodes import ENVIRONMENT

if __name__ == "__main__":
    ray.init(address=sys.argv[1], runtime_env={"env_vars": ENVIRONMENT}, log_to_driver=False)
    pool = RayEnginePool(hosts=2, devices_per_host=1, warmup="none", **SMALL).open()
    print(json.dumps([host["pid"] for host in pool.stats()["hosts"]]), flush=True)
    while True:
        pool.generate_all(["1+1="] * 50, {"max_new_tokens": 100, "ignore_eos": True})
