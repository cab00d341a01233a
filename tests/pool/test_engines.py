"""`pool.engines[i]` is upstream's Engine. Its front end is a stand-in that runs on engine i."""

import ast
import inspect
import textwrap
from typing import Any

import anyio
import pytest

from enginepool import EnginePool, EnginePoolError, InvalidRequest
from tests.pool.test_generation import params
from tests.support.liveness import SECONDS, until, waiting


@pytest.fixture(params=[0, 1])
def index(request: pytest.FixtureRequest) -> int:
    return request.param


def places(results: list[dict[str, Any]]) -> set[int]:
    return {result["meta_info"]["engine_index"] for result in results}


def test_engine_is_upstreams(scripted: EnginePool):
    """It has upstream's class, so that `isinstance` and all methods work."""
    from sgl_jax.srt.entrypoints.engine import Engine

    assert len(scripted.engines) == 2
    assert all(type(engine) is Engine for engine in scripted.engines)


def test_engine_has_every_attribute_that_upstream_sets(scripted: EnginePool):
    """It has every attribute that `Engine.__init__` assigns to `self`."""
    from sgl_jax.srt.entrypoints.engine import Engine

    tree = ast.parse(textwrap.dedent(inspect.getsource(Engine.__init__)))
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    assert "scheduler_info" in assigned
    for engine in scripted.engines:
        assert assigned <= set(vars(engine))


def test_engine_leads_to_its_model_on_its_device(scripted: EnginePool, index: int):
    """Other tools reach the model runner by this path. Its weights are on engine i's device."""
    scheduler = scripted.engines[index].scheduler_info["scheduler"]
    runner = scheduler.tp_worker.worker.model_runner
    devices = {d for leaf in runner.model_state_leaves for d in leaf.devices()}
    assert {device.id for device in devices} == {index}
    assert scripted.stats()["engines"][index]["devices"] == [index]


def test_generate_runs_on_its_engine(scripted: EnginePool, index: int):
    """One prompt, several, ids, n > 1: the pool's results, from engine i only."""
    engine = scripted.engines[index]
    sampling = params(5)[0]
    one = engine.generate("0", sampling, return_logprob=True)
    assert (one["text"], one["meta_info"]["engine_index"]) == ("12345", index)
    assert len(one["meta_info"]["output_token_logprobs"]) == 5
    many = engine.generate(["0", "a", "5"] * 4, sampling)
    assert [result["text"] for result in many] == ["12345", "bcdef", "67890"] * 4
    ids = engine.generate(input_ids=[[ord("0")], [ord("a")]], sampling_params=sampling)
    assert [result["text"] for result in ids] == ["12345", "bcdef"]
    samples = engine.generate("0", sampling | {"n": 6})
    assert [result["meta_info"]["sample_index"] for result in samples] == list(range(6))
    assert places([*many, *ids, *samples]) == {index}


def test_stream_runs_on_its_engine(scripted: EnginePool, index: int):
    """Upstream's `stream=True` gives an iterator of chunks."""
    chunks = list(scripted.engines[index].generate("你", params(13)[0], stream=True))
    assert chunks[-1]["text"] == "是谁🙂你"
    assert all(chunk["index"] == 0 for chunk in chunks)
    assert places(chunks) == {index}


def test_stream_that_is_left_ends_inside_the_engine(scripted: EnginePool):
    """A caller who closes upstream's iterator early leaves no request behind."""
    aborted = scripted.stats()["aborted"]
    stream = scripted.engines[1].generate("0", params(450)[0], stream=True)
    next(stream)
    stream.close()
    del stream
    scripted.engines[1].generate("0", params(450)[0])  # the other would have ended by now
    assert scripted.stats()["aborted"] == aborted + 1


def test_defaults_are_the_checkpoints(scripted: EnginePool, index: int):
    """Without sampling parameters: greedy, 16 tokens, as upstream intends."""
    result = scripted.engines[index].generate("0")
    assert result["text"] == scripted.generate("0")["text"] == "1234567890123456"


@pytest.mark.anyio
async def test_async_generate(scripted: EnginePool, index: int):
    """Results and chunks on asyncio and trio."""
    engine = scripted.engines[index]
    result = await engine.async_generate("0", params(5)[0])
    assert (result["text"], result["meta_info"]["engine_index"]) == ("12345", index)
    chunks = [c async for c in await engine.async_generate("a", params(4)[0], stream=True)]
    assert chunks[-1]["text"] == "bcde"
    assert places(chunks) == {index}


def test_generate_under_a_running_loop(scripted: EnginePool):
    """Upstream's own method would raise, because it runs its own event loop on the caller's
    thread."""

    async def main() -> str:
        return scripted.engines[0].generate("0", params(3)[0])["text"]

    assert anyio.run(main) == "123"


def test_flush_cache_is_its_engines_alone(scripted: EnginePool):
    """The other engine's prefix cache stays."""
    prompt = "0123456789" * 6
    for engine in scripted.engines:
        engine.generate(prompt, params(1)[0])
    assert scripted.engines[0].flush_cache().success
    cached = [
        engine.generate(prompt, params(1)[0])["meta_info"]["cached_tokens"]
        for engine in scripted.engines
    ]
    assert cached[0] == 0
    assert cached[1] > 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_holds_its_engine_alone(scripted: EnginePool, mode: str):
    """The pool continues with the other engines. Requests pinned to the paused engine wait, and
    are right afterwards."""
    engine = scripted.engines[0]
    engine.pause_generation(mode)
    try:
        with anyio.from_thread.start_blocking_portal() as portal:
            waiting = portal.start_task_soon(engine.async_generate, "0", params(5)[0])
            results = scripted.generate_all(["a"] * 6, params(5)[0], timeout=60)
            assert not waiting.done()
            assert scripted.stats()["engines"][0]["state"] == "paused"
            engine.continue_generation()
            assert waiting.result()["text"] == "12345"
    finally:
        engine.continue_generation()
    assert places(results) == {1}
    assert [result["text"] for result in results] == ["bcdef"] * 6
    assert scripted.stats()["engines"][0]["state"] == "serving"


def test_pause_that_aborts_ends_what_waits_for_its_engine(scripted: EnginePool):
    """Requests of the pool itself go on with the other engine."""
    first, second = scripted.engines
    first.pause_generation("in_place")
    try:
        with anyio.from_thread.start_blocking_portal() as portal:
            pinned = portal.start_task_soon(first.async_generate, "0", params(5)[0])
            until(lambda: waiting(scripted) == 1)
            second.pause_generation("in_place")
            free = portal.start_task_soon(scripted.async_generate, "a", params(5)[0])
            until(lambda: waiting(scripted) == 2)
            first.pause_generation("abort")
            assert pinned.result(SECONDS)["meta_info"]["finish_reason"]["type"] == "abort"
            assert not free.done()
            second.continue_generation()
            assert free.result(SECONDS)["text"] == "bcdef"
    finally:
        scripted.continue_generation()


def test_one_engine_goes_on_in_a_paused_pool(scripted: EnginePool):
    """It serves the pool's requests while the others are paused."""
    scripted.pause_generation()
    try:
        scripted.engines[1].continue_generation()
        results = scripted.generate_all(["a"] * 6, params(5)[0], timeout=60)
        states = [engine["state"] for engine in scripted.stats()["engines"]]
    finally:
        scripted.continue_generation()
    assert states == ["paused", "serving"]
    assert places(results) == {1}
    assert [result["text"] for result in results] == ["bcdef"] * 6


def test_abort_request_is_its_engines_alone(scripted: EnginePool):
    """`abort_all` on one engine leaves the requests of the others."""
    first, second = scripted.engines
    streams = [engine.generate("0", params(450)[0], stream=True) for engine in (first, second)]
    for stream in streams:
        next(stream)
    first.abort_request(abort_all=True)
    ends = [list(stream)[-1] for stream in streams]
    assert ends[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert ends[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 450}
    assert len(ends[1]["output_ids"]) == 450


def test_server_info(scripted: EnginePool, index: int):
    """Upstream's report, with engine i's state inside."""
    info = scripted.engines[index].get_server_info()
    assert info["model_path"] == scripted.config.model
    assert info["internal_states"][0]["engine_index"] == index
    assert info["internal_states"][0]["state"] == "serving"


def test_shutdown_names_close(scripted: EnginePool, index: int):
    """An engine cannot leave its pool, neither by `shutdown` nor at the end of a `with`."""
    engine = scripted.engines[index]
    with pytest.raises(EnginePoolError, match=r"pool\.close\(\)"):
        engine.shutdown()
    with pytest.raises(EnginePoolError, match=r"pool\.close\(\)"), engine:
        pass
    assert engine.generate("0", params(2)[0])["text"] == "12"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprob_start_len": 0}, "logprob_start_len=0"),
        ({"lora_path": "x"}, "lora_path"),
        ({"sampling_params": {"top_p": 7}}, "top_p=7"),
    ],
)
def test_what_a_pool_cannot_do_is_refused(
    scripted: EnginePool, arguments: dict[str, Any], message: str
):
    """The error has the name, and nothing has started."""
    with pytest.raises(InvalidRequest, match=message):
        scripted.engines[0].generate("0", **({"sampling_params": params(2)[0]} | arguments))
