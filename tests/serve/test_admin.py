"""The reference's administration on four engines, and who may use it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, toy
from enginepool.errors import InvalidConfig
from enginepool.serve.options import ServeOptions
from tests.support.liveness import callers, until, waiting
from tests.support.servers import Running, generate, serving

SUM = "12+7="
SUBTRACT = str(toy.checkpoint().parent / "subtract")


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def answers(running: Running) -> list[str]:
    """Each engine's, on its own port."""
    texts = []
    for engine in range(4):
        with running.http(engine) as client:
            result = generate(client, SUM)
            assert result["meta_info"]["engine_index"] == engine
            texts.append(result["text"])
    return texts


def test_perturb(administered: Running) -> None:
    """The checksum afterwards is `checksum_after`, on every port; the noise is the seed's."""
    with administered.http() as client:
        before = client.get("/admin/weights_checksum").json()
        body = {"seed": 3, "scale": 0.001, "num_leaves": 2}
        done = client.post("/admin/perturb_weights", json=body).json()
        assert done["ok"] is True
        assert done["num_leaves"] == 2
        assert done["checksum_before"] == before["checksum"]
        assert done["checksum_delta"] == done["checksum_after"] - done["checksum_before"] != 0
    for engine in range(4):
        with administered.http(engine) as client:
            after = client.get("/admin/weights_checksum").json()
            assert after["checksum"] == done["checksum_after"]
            assert after["fingerprint"] != before["fingerprint"]


@pytest.mark.parametrize("path", [SUBTRACT, "subtract", "../toy/subtract"])
def test_reload(administered: Running, sums: EnginePool, path: str) -> None:
    """The other checkpoint, on every engine, from any engine's port; and it is named."""
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
    """Checkpoints below `tmp_path` / "root", and one outside, that must not be loaded."""
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
    """Weights and answers are as they were, and the reply says why; so does the status."""
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
    """Weights alone, as a trainer writes them; and a config that says the same in other words."""
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
    """Only what the server started with."""
    with serving(sums, enable_admin=True) as running, running.http() as client:
        reply = client.post("/admin/reload_weights", json={"model_path": SUBTRACT})
        assert reply.status_code == 403
        assert "--model-root" in reply.json()["error"]
        own = client.post("/admin/reload_weights", json={"model_path": sums.config.model})
        assert own.json()["ok"] is True
    sums.update_weights(toy.checkpoint(), weight_version=0)


def test_pause_and_continue(administered: Running, sums: EnginePool) -> None:
    """A paused server is alive and not ready, and answers later; both sets of names."""
    with administered.http() as client:
        for pause, resume in (
            ("/admin/pause", "/admin/continue"),
            ("/pause_generation", "/continue_generation"),
        ):
            assert client.get("/ready").status_code == 200
            assert client.post(pause, json={"mode": "in_place"}).status_code == 200
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            with administered.http(1) as one:
                assert one.get("/ready").status_code == 503
            assert client.post(resume).status_code == 200
            assert client.get("/ready").status_code == 200
        for flush in ("/admin/flush_cache", "/flush_cache"):
            assert client.post(flush).status_code == 200
        memory = client.get("/admin/memory").json()["memory"]
        assert len(memory["devices"]) == 4
        info = client.get("/get_model_info").json()
        assert info["model_path"] == sums.config.model
        rows = client.post(
            "/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 3}
        ).json()
        assert len(rows) == 3
        bad = client.get("/get_weights_by_name", params={"name": "none"})
        assert bad.status_code == 400


def test_abort(administered: Running, sums: EnginePool) -> None:
    """By the id that the request was sent with; it has what it got so far."""
    with administered.http() as client, administered.http() as other:
        body = {
            "text": SUM,
            "rid": "mine",
            "stream": True,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
        with client.stream("POST", "/generate", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            assert other.post("/abort_request", json={"rid": "min"}).json() == {"ok": True}
            assert other.post("/abort_request", json={"rid": "mine"}).json() == {"ok": True}
            *_, last, error, done = lines
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["code"] == "aborted"
        assert '"type":"abort"' in last


@pytest.mark.parametrize("reject", [True, False])
def test_requests_during_a_reload(sums: EnginePool, reject: bool) -> None:
    """While new weights wait for a running request, others wait as well, and get the new ones;
    with the option they get 503."""
    held = {
        "text": SUM,
        "rid": "held",
        "sampling_params": {"max_new_tokens": 490, "ignore_eos": True},
    }
    options: dict[str, Any] = {"enable_admin": True, "model_root": Path(SUBTRACT).parent}
    with (
        serving(sums, **options, reject_while_reloading=reject) as running,
        running.http() as client,
        callers() as threads,
    ):
        first = threads.submit(client.post, "/generate", json=held)
        until(lambda: sums.stats()["running"])
        reload = threads.submit(client.post, "/admin/reload_weights", json={"model_path": SUBTRACT})
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


def test_off_by_default(plain: Running) -> None:
    with plain.http() as client:
        for path in ("/admin/weights_checksum", "/admin/memory", "/get_model_info", "/flush_cache"):
            assert client.get(path).status_code == 404
        assert client.post("/admin/pause").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1"},
        {"Origin": "null"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example:31000"},
        {"Host": ""},
    ],
)
def test_browsers_and_proxies(administered: Running, headers: dict[str, str]) -> None:
    """Without a token, nothing that another site's page could have sent."""
    with administered.http(headers=headers) as client:
        for path in ("/admin/pause", "/pause_generation", "/flush_cache"):
            reply = client.post(path)
            assert reply.status_code == 403, path
        assert client.get("/admin/memory").status_code == 403
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200  # nothing was paused


def test_token(sums: EnginePool) -> None:
    """With a token only the token counts: not the API key, not where the request comes from."""
    with serving(sums, enable_admin=True, admin_token="admin", api_key="key") as running:
        for token, status in (("admin", 200), ("key", 401), ("adm", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with running.http(headers=headers) as client:
                assert client.get("/admin/memory").status_code == status
                assert client.get("/get_model_info").status_code == status
                assert client.get("/v1/models").status_code == (200 if token == "key" else 401)
        headers = {"Authorization": "Bearer admin", "Origin": "http://dashboard"}
        with running.http(headers=headers) as client:
            assert client.get("/admin/memory").status_code == 200


def test_key_guards_administration_too(sums: EnginePool) -> None:
    with serving(sums, enable_admin=True, api_key="key") as running:
        assert running.http().get("/admin/memory").status_code == 401
        with running.http(headers={"Authorization": "Bearer key"}) as client:
            assert client.get("/admin/memory").status_code == 200


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_admin": True, "host": "0.0.0.0"}, "--admin-token"),
        ({"enable_admin": True, "host": "::"}, "--admin-token"),
        ({"admin_token": "x"}, "--enable-admin"),
        ({"enable_admin": True, "admin_token": " "}, "empty"),
        ({"api_key": ""}, "empty"),
        ({"enable_admin": True, "model_root": Path("/nowhere")}, "no such directory"),
        ({"port": 70000}, "65535"),
        ({"port": 31000, "engine_ports": (31000,)}, "one port"),
        ({"request_timeout": 0}, "request_timeout=0"),
        ({"max_n": 0}, "max_n=0"),
        ({"header_timeout": 0}, "header_timeout=0"),
        ({"body_timeout": -1}, "body_timeout=-1"),
        ({"keep_alive_timeout": 0}, "keep_alive_timeout=0"),
    ],
)
def test_options_that_cannot_hold(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        ServeOptions(**options)
