"""Reloads: which are accepted, which are refused and change nothing, and the model's name
afterwards."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, toy
from tests.support.faults import hang_in_reset, hang_in_step, raise_in_step
from tests.support.liveness import SECONDS, callers, until, waiting
from tests.support.servers import Running, generate, serving

SUM = "12+7="
SUBTRACT = str(toy.checkpoint().parent / "subtract")


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def answers(running: Running) -> list[str]:
    """Each engine's answer, on its own port."""
    texts = []
    for engine in range(4):
        with running.http(engine) as client:
            result = generate(client, SUM)
            assert result["meta_info"]["engine_index"] == engine
            texts.append(result["text"])
    return texts


@pytest.mark.parametrize("path", [SUBTRACT, "subtract", "../toy/subtract"])
def test_reload(administered: Running, sums: EnginePool, path: str) -> None:
    """Every engine gets the other checkpoint, from any engine's port, and the routes name it."""
    assert answers(administered) == ["19"] * 4
    with administered.http(2) as client:
        assert client.get("/admin/reload_status").json() == {
            "reloading": False, "last_ok": None, "last_error": None,
            "model_path": sums.config.model, "weight_version": 0,
        }  # fmt: skip
        done = client.post("/admin/reload_weights", json={"model_path": path}).json()
        assert done["ok"] is True
        assert done["model_path"] == path
        assert done["elapsed_sec"] > 0
        assert len(done["report"]["engines"]) == 4
        said = client.get("/admin/reload_status").json()
        assert said["last_ok"] is True
        version = done["report"]["weight_version"]
        for named in (said, client.get("/get_model_info").json(), client.get("/status").json()):
            assert (named["model_path"], named["weight_version"]) == (SUBTRACT, version)
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == (sums.config.model, SUBTRACT)
    assert answers(administered) == ["5"] * 4


def test_reload_by_sglangs_name(administered: Running) -> None:
    with administered.http() as client:
        reply = client.post("/update_weights_from_disk", json={"model_path": SUBTRACT})
        assert reply.json()["success"] is True
        assert generate(client, SUM)["text"] == "5"
        reply = client.post("/update_weights_from_disk", json={"model_path": "none"})
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        assert "no such directory" in reply.json()["message"]


@pytest.fixture
def broken(sums: EnginePool, model_dir: Any, tmp_path: Path) -> dict[str, Path]:
    """Checkpoints below `tmp_path` / "root", and one outside, which must not be loaded."""
    root = tmp_path / "root"
    short = root / "short"
    shutil.copytree(toy.checkpoint(), short)
    (weights,) = short.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(model_dir("qwen3"), root / "other")
    shutil.copytree(toy.checkpoint(), tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "empty").mkdir()
    for name, change in (("rope", {"rope_theta": 77.0}), ("end", {"eos_token_id": 7})):
        shutil.copytree(toy.checkpoint(), root / name)
        config = root / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    shutil.copytree(toy.checkpoint(), root / "unreadable")
    (root / "unreadable" / "config.json").write_text("{")
    names = ("short", "other", "link", "empty", "missing", "../outside")
    return {name: root / name for name in (*names, "rope", "end", "unreadable")}


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("short", 400, "safetensors"),
        ("other", 400, "does not fit the model"),
        ("empty", 400, "safetensors"),
        ("missing", 400, "no such directory"),
        ("link", 403, "outside of --model-root"),
        ("../outside", 403, "outside of --model-root"),
        ("rope", 400, r"config.json does not fit.*rope.*77.0.*served"),
        ("end", 400, r"config.json does not fit.*eos_token_id=7 \(served: 258\)"),
        ("unreadable", 400, "config.json cannot be read"),
        ("\0", 400, "null"),
        ("x" * 5000, 400, "too long"),
    ],
)
def test_bad_reloads(
    sums: EnginePool, broken: dict[str, Path], name: str, status: int, why: str
) -> None:
    """Weights and answers stay, and the reply and the status give the reason."""
    root = broken["short"].parent
    engine_ports = (0, 0, 0, 0)
    with serving(sums, enable_admin=True, model_root=root, engine_ports=engine_ports) as running:
        with running.http() as client:
            before = client.get("/admin/weights_checksum").json()
            reply = client.post(
                "/admin/reload_weights", json={"model_path": str(broken.get(name, name))}
            )
            assert reply.status_code == status
            assert reply.json()["ok"] is False
            assert re.search(why, reply.json()["error"])
            state = client.get("/admin/reload_status").json()
            assert (state["reloading"], state["last_ok"]) == (False, False)
            assert state["last_error"]
            assert state["model_path"] == sums.config.model
            assert client.get("/admin/weights_checksum").json() == before
        assert answers(running) == ["19"] * 4


def test_a_reload_without_its_config(sums: EnginePool, tmp_path: Path) -> None:
    """Weights only, as a trainer writes them; and a config.json that says the same in other
    words."""
    for name in ("alone", "rewritten"):
        shutil.copytree(SUBTRACT, tmp_path / name)
    (tmp_path / "alone" / "config.json").unlink()
    config = tmp_path / "rewritten" / "config.json"
    said = json.loads(config.read_text()) | {"use_cache": False, "transformers_version": "1"}
    config.write_text(json.dumps(said))
    with serving(sums, enable_admin=True, model_root=tmp_path) as running, running.http() as client:
        for name in ("alone", "rewritten"):
            body = {"model_path": name}
            assert client.post("/admin/reload_weights", json=body).json()["ok"] is True, name
            assert generate(client, SUM)["text"] == "5"
            own = {"model_path": sums.config.model}
            assert client.post("/admin/reload_weights", json=own).json()["ok"] is True
            assert client.get("/status").json()["model_path"] == sums.config.model
    sums.update_weights(toy.checkpoint(), weight_version=0)


def test_without_a_root(sums: EnginePool) -> None:
    """Only the model that the server started with."""
    with serving(sums, enable_admin=True) as running, running.http() as client:
        reply = client.post("/admin/reload_weights", json={"model_path": SUBTRACT})
        assert reply.status_code == 403
        assert "--model-root" in reply.json()["error"]
        own = client.post("/admin/reload_weights", json={"model_path": sums.config.model})
        assert own.json()["ok"] is True
    sums.update_weights(toy.checkpoint(), weight_version=0)


def test_while_the_only_engine_comes_back(one_sum: EnginePool) -> None:
    """503 with Retry-After, as for a request that no engine can serve."""
    hang = hang_in_reset(one_sum, 0)
    raise_in_step(one_sum, 0)
    with (
        serving(one_sum, enable_admin=True) as running,
        running.http() as client,
        callers() as threads,
    ):
        try:
            held = threads.submit(generate, client, SUM)
            until(lambda: states(one_sum) == ["resetting"])
            for path, body in (
                ("/admin/reload_weights", {"model_path": one_sum.config.model}),
                ("/admin/perturb_weights", {}),
                ("/release_memory_occupation", {}),
                ("/get_weights_by_name", {"name": "model.norm.weight"}),
                ("/admin/weights_checksum", None),
            ):
                asked = client.get(path) if body is None else client.post(path, json=body)
                assert (asked.status_code, asked.headers["retry-after"]) == (503, "10"), path
                assert "come back" in asked.json()["error"]
        finally:
            hang.set()
        assert held.result()["text"] == "19"
        assert client.get("/admin/weights_checksum").status_code == 200


@pytest.mark.parametrize("reject", [True, False])
def test_requests_during_a_reload(sums: EnginePool, reject: bool) -> None:
    """While new weights wait for a running request, other requests wait, too, and get the new
    weights. With the option they get 503."""
    held = {
        "text": SUM,
        "rid": "held",
        "sampling_params": {"max_new_tokens": 490, "ignore_eos": True},
    }
    options: dict[str, Any] = {"enable_admin": True, "model_root": Path(SUBTRACT).parent}
    options |= {"engine_ports": (0, 0, 0, 0), "reject_while_reloading": reject}
    hang = hang_in_step(sums, 0, at=5)
    with (
        serving(sums, **options) as running,
        running.http() as client,
        running.http(0) as one,
        callers() as threads,
    ):
        first = threads.submit(one.post, "/generate", json=held)
        try:
            assert hang.begun.wait(SECONDS)
            body = {"model_path": SUBTRACT}
            reload = threads.submit(client.post, "/admin/reload_weights", json=body)
            until(sums.runtime.workers[0].channel.has_jobs)  # it has staged
        finally:
            hang.set()
        # Before that, while weights are staged, engines serve the old ones.
        until(lambda: "draining" in states(sums))
        if reject:
            refused = client.post("/generate", json={"text": SUM})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        else:
            late = threads.submit(generate, client, SUM)
            until(lambda: waiting(sums))
        client.post("/abort_request", json={"rid": "held"})
        assert first.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert reload.result().json()["ok"] is True
        if not reject:
            assert late.result()["text"] == "5"
    sums.update_weights(toy.checkpoint(), weight_version=0)
