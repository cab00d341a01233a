"""The actor of a host, without Ray."""

import asyncio
from typing import Any

from enginepool.ray.host import Host
from tests.support.faults import raise_in_step
from tests.support.liveness import until
from tests.support.pools import SMALL


def test_a_host_whose_first_engine_is_out() -> None:
    """It checks calls, and starts again as before."""

    async def main() -> None:
        args: dict[str, Any] = {"devices": 2, "warmup": "none", "restart": False, **SMALL}
        host: Any = Host(0, args)
        about = await host.start()
        try:
            engine = host._pool.engines[0]
            raise_in_step(host._pool, 0)
            await asyncio.to_thread(engine.generate, input_ids=[5])
            await asyncio.to_thread(until, lambda: "scheduler" not in engine.scheduler_info)
            assert await host.check(None, None, {"input_ids": [[5, 6]]}) == [([5, 6], 1)]
            assert await host.start() == about
        finally:
            await host.stop()

    asyncio.run(main())
