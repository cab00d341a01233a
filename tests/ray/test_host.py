"""The actor of a host, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from enginepool.ray.call import RayCall
from enginepool.ray.host import Host
from tests.support.faults import raise_in_step
from tests.support.liveness import until
from tests.support.pools import SMALL


@asynccontextmanager
async def started(**args: Any) -> AsyncIterator[Any]:
    host = Host(0, {"devices": 1, "warmup": "none", **SMALL, **args})
    try:
        await host.start()
        yield host
    finally:
        await host.stop()


class Reader:
    """Polls a host, as its driver does."""

    def __init__(self, host: Any) -> None:
        self._host, self._seen = host, 0
        self._found: dict[int, Any] = {}

    async def ended(self, keys: Iterable[int]) -> list[Any]:
        """The results or errors of these attempts."""
        while not self._found.keys() >= set(keys):
            news = await self._host.poll(self._seen)
            self._seen = news.number
            self._found |= dict([*news.finished, *news.failed])
        return [self._found[key] for key in keys]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_host_whose_first_engine_is_out() -> None:
    """It checks calls, and starts again as before."""

    async def main() -> None:
        async with started(devices=2, restart=False) as host:
            about = await host.start()
            engine = host._pool.engines[0]
            raise_in_step(host._pool, 0)
            await asyncio.to_thread(engine.generate, input_ids=[5])
            await asyncio.to_thread(until, lambda: "scheduler" not in engine.scheduler_info)
            (one,) = await host.check(None, None, {"input_ids": [[5, 6]]})
            assert one.input_ids == [5, 6]
            assert await host.start() == about

    run(main)


def test_an_output_of_the_checkpoints_parameters_moves() -> None:
    """The call has no parameters and no seed. What another host continues has the same tokens."""
    preferred = '{"temperature": 1.0, "top_k": -1, "max_new_tokens": 9, "min_new_tokens": 9}'

    async def main() -> None:
        async with started(preferred_sampling_params=preferred) as host:
            prompts = {"input_ids": [[5, 6], [7] * 505]}
            call = RayCall(await host.check(None, None, prompts), {}, every=False)
            assert await host.submit([o.attempt(o.position) for o in call.outputs], 0)
            reader = Reader(host)
            ids, cut = [result["output_ids"] for result in await reader.ended(range(2))]
            assert len(ids) == 9 > len(cut)
            output = call.outputs[0]
            output.gain({"output_ids": ids[:4], "meta_info": {}})
            assert await host.submit([output.attempt(2)], 0)
            (moved,) = await reader.ended([2])
            assert moved["output_ids"] == ids

    run(main)


def test_more_grammars_than_a_pool_compiles_at_a_time() -> None:
    """They come from one call, which another host has checked. All are compiled in the end."""

    async def main() -> None:
        async with started() as host:
            params = [{"regex": f"{n}[ab]", "temperature": 0.0} for n in range(60)]
            prompts = {"input_ids": [[5]] * len(params)}
            call = RayCall(await host.check(None, params, prompts), {}, every=False)
            host._pool.runtime.input_processor.grammars.kept.clear()
            assert await host.submit([o.attempt(o.position) for o in call.outputs], 0)
            for key, result in enumerate(await Reader(host).ended(range(len(params)))):
                assert result["text"][:-1] == str(key)

    run(main)
