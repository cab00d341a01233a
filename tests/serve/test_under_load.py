"""Many clients at once, while weights change and while clients leave."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginepool import EnginePool, toy
from tests.support.liveness import SECONDS, at_rest, paused, running, until, waiting
from tests.support.servers import Running, serving

CLIENTS, REQUESTS = 64, 200
LEAVERS = 100
SUMS = [f"{a}+{b}=" for a, b in ((12, 7), (30, 4), (21, 13), (44, 5), (18, 18), (25, 11))]
# After the end token the toy continues, so that a mixture has more tokens to show in.
PARAMS = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
CHECKPOINTS = [toy.checkpoint(), toy.checkpoint().parent / "subtract"]


@pytest.fixture(scope="module")
def expected(sums: EnginePool) -> list[dict[str, list[int]]]:
    """The answer of each checkpoint to each sum."""
    answers = []
    for checkpoint in reversed(CHECKPOINTS):
        sums.update_weights(checkpoint, weight_version=0)
        results = sums.generate_all(SUMS, PARAMS)
        answers.insert(0, {t: r["output_ids"] for t, r in zip(SUMS, results, strict=True)})
    assert all(answers[0][text] != answers[1][text] for text in SUMS)
    return answers


def test_reloads_under_load(
    administered: Running, sums: EnginePool, expected: list[dict[str, list[int]]]
) -> None:
    """No request is lost, and each is answered by the weights that it names."""

    async def client(http: httpx.AsyncClient, asked: Iterator[str], done: list[Any]) -> None:
        for text in asked:
            reply = await http.post("/generate", json={"text": text, "sampling_params": PARAMS})
            done.append((text, reply))

    async def reload(http: httpx.AsyncClient, versions: dict[int, int]) -> None:
        turn = 0
        while True:
            turn = 1 - turn
            reply = await http.post(
                "/admin/reload_weights", json={"model_path": str(CHECKPOINTS[turn])}
            )
            versions[reply.json()["report"]["weight_version"]] = turn

    async def main() -> tuple[list[Any], dict[int, int]]:
        versions, done = {0: 0}, []

        def work() -> Iterator[str]:
            """So many requests, and until there were two reloads."""
            while asked[0] < REQUESTS or len(versions) < 3:
                asked[0] += 1
                yield SUMS[asked[0] % len(SUMS)]

        async with httpx.AsyncClient(base_url=administered.url(), timeout=SECONDS) as http:
            reloads = asyncio.create_task(reload(http, versions))
            await asyncio.gather(*(client(http, work(), done) for _ in range(CLIENTS)))
            reloads.cancel()
            await asyncio.gather(reloads, return_exceptions=True)
        return done, versions

    asked = [0]
    done, versions = asyncio.run(main())
    assert len(done) == asked[0]
    # A reload whose reply nobody waited for comes after the last known one.
    versions[max(versions) + 1] = 1 - versions[max(versions)]
    seen = set()
    for text, reply in done:
        assert reply.status_code == 200, reply.text
        result = reply.json()
        ((start, end, version),) = result["meta_info"]["weight_versions"]
        assert (start, end) == (0, len(result["output_ids"]))
        assert result["output_ids"] == expected[versions[version]][text]
        seen.add(version)
    assert len(seen) > 1


def stream_body(path: str) -> dict[str, Any]:
    long = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
    if path == "/generate":
        return {"text": SUMS[0], "stream": True, "sampling_params": long}
    return {
        "model": "toy",
        "prompt": SUMS[0],
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_clients_that_leave(plain: Running, sums: EnginePool, path: str) -> None:
    """A hundred clients hang up in mid-stream. Soon after the last one none of their requests
    runs or waits, long before they would have ended."""

    async def leave(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", path, json=stream_body(path)) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line:
                    return

    async def main() -> None:
        limits = httpx.Limits(max_connections=LEAVERS)
        async with httpx.AsyncClient(base_url=plain.url(), timeout=SECONDS, limits=limits) as http:
            await asyncio.gather(*(leave(http) for _ in range(LEAVERS)))

    before = sums.stats()["aborted"]
    asyncio.run(main())
    until(lambda: at_rest(sums) and not waiting(sums))
    assert sums.stats()["aborted"] - before > LEAVERS / 2  # few finished meanwhile


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_reply(plain: Running, sums: EnginePool, stream: bool) -> None:
    """Requests of clients that wait for a reply end, too, also in the queue."""
    body = {**stream_body("/generate"), "text": SUMS[:2] * 20, "stream": stream}
    with plain.http() as http, paused(sums):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/generate", json=body, timeout=0.3)
        until(lambda: not waiting(sums))
    until(lambda: at_rest(sums))


def test_a_client_that_left_costs_two_steps_at_most(
    one_sum: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the server knows that the client has left, the engine takes at most two more steps."""
    runtime = one_sum.runtime
    worker = runtime.workers[0]
    noticed: list[int] = []
    original = runtime.dispatch.abort

    def abort(*args: Any) -> None:
        noticed.append(worker.channel.steps)
        original(*args)

    monkeypatch.setattr(runtime.dispatch, "abort", abort)
    with serving(one_sum) as server, server.http() as http:
        with http.stream("POST", "/generate", json=stream_body("/generate")) as reply:
            next(reply.iter_lines())
        until(lambda: at_rest(one_sum))
    assert running(one_sum) == 0
    assert worker.channel.steps <= noticed[0] + 2


def test_drain_timeout(one_sum: EnginePool) -> None:
    """Requests that do not finish in time end with their tokens."""
    with (
        serving(one_sum, drain_timeout=0.1) as server,
        server.http() as http,
        http.stream("POST", "/generate", json=stream_body("/generate")) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        with paused(one_sum):
            server.server.stop()
            rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert '"code": "draining"' in rest[-2]
    assert '"type":"abort"' in rest[-3]
