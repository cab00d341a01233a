"""A request names an adapter that is not loaded, and a folder has it."""

import shutil
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginepool import EnginePool
from tests.lora.conftest import TOKENS, World
from tests.lora.test_exact import GREEDY, PROMPTS, check
from tests.lora.test_served import as_result, post
from tests.support.adapters import agrees
from tests.support.liveness import callers, paused, until, waiting
from tests.support.servers import Running, serving

COMPLETION: dict[str, Any] = {
    "prompt": PROMPTS[0], "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
    "logprobs": True, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resolver")


@pytest.fixture(scope="module")
def server(opened: EnginePool, root: Path) -> Iterator[Running]:
    with serving(opened, enable_admin=True, lora_resolver_dir=root) as running:
        yield running


@pytest.fixture
def folder(root: Path, world: World, adapted: EnginePool) -> Iterator[Path]:
    """The resolver's folder, with adapters "a" to "d"."""
    for name in "abcd":
        shutil.copytree(world.folders[name], root / name)
    yield root
    for each in root.iterdir():
        each.unlink() if each.is_symlink() else shutil.rmtree(each)


@pytest.fixture
def client(server: Running, folder: Path) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def check_completion(world: World, name: str, made: Any) -> None:
    expected = world.expected(name, [PROMPTS[0]])[0]
    for choice in made["choices"]:
        values = choice["logprobs"]["token_logprobs"]
        assert agrees(as_result(choice["token_ids"], values), expected)


def loaded(pool: EnginePool) -> list[str]:
    return list(pool.stats()["lora_adapters"])


def test_what_skyrl_sends(
    client: httpx.Client, folder: Path, adapted: EnginePool, world: World
) -> None:
    """A checkpoint that appears while the server runs, named by run and checkpoint."""
    name = "model_1f2e_000003"
    shutil.copytree(world.folders["a"], folder / name)
    body = COMPLETION | {"model": name, "n": 2, "seed": 7, "top_p": 1.0, "top_k": -1,
                         "stream": False}  # fmt: skip
    reply = client.post("/v1/completions", json=body, headers={"X-Session-ID": "s-1"})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 2
    check_completion(world, "a", reply.json())
    scored = post(client, "/v1/completions", **body | {"prompt_logprobs": 1, "max_tokens": 1})
    rows = scored["choices"][0]["prompt_logprobs"]
    ids = PROMPTS[0]
    values = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]
    (expected,) = adapted.generate_all(
        input_ids=[ids], sampling_params={"max_new_tokens": 0}, return_prompt_logprob=True,
        lora_path=name,
    )  # fmt: skip
    entries = expected["meta_info"]["input_token_logprobs"][1:]
    assert values == pytest.approx([entry[0] for entry in entries], abs=1e-4)
    # Its newer client loads the adapter first, and treats "already" as success.
    body = {"lora_name": name, "lora_path": str(folder / name)}
    error = post(client, "/v1/load_lora_adapter", 400, **body)["error"]
    assert "already" in error["message"]
    assert loaded(adapted) == [name]


def test_generate_by_folder(client: httpx.Client, world: World) -> None:
    made = post(client, "/generate", input_ids=PROMPTS[:3], lora_path=["a", None, "b"],
                sampling_params=GREEDY, return_logprob=True)  # fmt: skip
    check(world, PROMPTS[:3], ["a", None, "b"], made)


def test_never_outside_the_folder(
    client: httpx.Client, folder: Path, adapted: EnginePool, world: World
) -> None:
    outside = world.folders["a"]
    (folder / "link").symlink_to(outside)
    shutil.copytree(outside, folder / "file")
    (folder / "file" / "adapter_model.safetensors").unlink()
    (folder / "file" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    shutil.copytree(outside, folder / ".hidden")
    shutil.copytree(outside, folder / "deep" / "er")
    (folder / "within").symlink_to(folder / "a")
    names = ("link", "file", ".hidden", "deep/er", "deep", ".", "..", "../resolver", "x" * 1000)
    for name in (*names, str(outside), str(folder / "a"), "a/", "./a", "a\0", "a\n"):
        error = post(client, "/v1/completions", 404, model=name, **COMPLETION)["error"]
        assert error["code"] == "model_not_found"
    assert loaded(adapted) == []
    check_completion(world, "a", post(client, "/v1/completions", model="within", **COMPLETION))


def test_broken_until_repaired(client: httpx.Client, folder: Path, world: World) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    error = post(client, "/v1/completions", 400, model="a", **COMPLETION)["error"]
    assert "adapter_model" in error["message"]
    file.write_bytes(whole)
    check_completion(world, "a", post(client, "/v1/completions", model="a", **COMPLETION))


def test_one_load_a_name(client: httpx.Client, adapted: EnginePool, world: World) -> None:
    """Many clients ask at once, and one of them leaves meanwhile."""
    before = adapted.runtime.adapters.next_number()
    with callers(6) as threads:
        with adapted.runtime.steering.hold("a test"):
            asked = [
                threads.submit(post, client, "/v1/completions", model="a", **COMPLETION)
                for _ in range(5)
            ]
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json=COMPLETION | {"model": "a"}, timeout=0.3)
            assert not wait(asked, timeout=0).done
        for one in asked:
            check_completion(world, "a", one.result())
    assert adapted.runtime.adapters.next_number() == before + 2


def test_a_client_that_leaves_alone(
    client: httpx.Client, adapted: EnginePool, world: World
) -> None:
    """The adapter is loaded for the next client."""
    with adapted.runtime.steering.hold("a test"), pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=COMPLETION | {"model": "a"}, timeout=0.3)
    until(lambda: loaded(adapted) == ["a"])
    check_completion(world, "a", post(client, "/v1/completions", model="a", **COMPLETION))


def test_the_least_recently_used_goes(
    client: httpx.Client, adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted.runtime.adapters, "most", 2)
    for name, left in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
        check_completion(world, name, post(client, "/v1/completions", model=name, **COMPLETION))
        assert sorted(loaded(adapted)) == list(left)
    # An administrator's load of that folder makes room too.
    post(client, "/v1/load_lora_adapter", lora_name="d", lora_path="d")
    assert sorted(loaded(adapted)) == ["b", "d"]


def test_checkpoints_that_were_deleted(
    client: httpx.Client,
    folder: Path,
    adapted: EnginePool,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer keeps its latest checkpoints only. Adapters with other names or labels are not
    dropped."""
    monkeypatch.setattr(adapted.runtime.adapters, "most", 1)
    check_completion(world, "a", post(client, "/v1/completions", model="a", **COMPLETION))
    shutil.rmtree(folder / "a")
    check_completion(world, "a", post(client, "/v1/completions", model="a", **COMPLETION))
    check_completion(world, "b", post(client, "/v1/completions", model="b", **COMPLETION))
    assert loaded(adapted) == ["b"]
    post(client, "/v1/completions", 404, model="a", **COMPLETION)
    others: Any = (("b", {"weight_version": "step-3"}), ("x", {}))
    for name, more in others:
        post(client, "/load_lora_adapter", lora_name=name, lora_path="b", **more)
        error = post(client, "/v1/completions", 503, model="c", **COMPLETION)["error"]
        assert error["code"] == "adapters_full"
        adapted.unload_lora_adapter(name)


def test_no_adapter_can_be_dropped(
    client: httpx.Client, adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter is in use and one came from elsewhere. The reply is 503 until one can be
    dropped."""
    monkeypatch.setattr(adapted.runtime.adapters, "most", 2)
    adapted.load_lora_adapter("mine", world.folders["d"])
    with callers() as threads:
        with paused(adapted):
            call = threads.submit(post, client, "/v1/completions", model="a", **COMPLETION)
            until(lambda: waiting(adapted) == 1)
            reply = client.post("/v1/completions", json=COMPLETION | {"model": "b"})
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "adapters_full"
            assert reply.headers["Retry-After"]
            assert sorted(loaded(adapted)) == ["a", "mine"]
        check_completion(world, "a", call.result())
    check_completion(world, "b", post(client, "/v1/completions", model="b", **COMPLETION))
    assert sorted(loaded(adapted)) == ["b", "mine"]
