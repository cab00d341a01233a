"""The reference's administration of four engines, and who may use it."""

import json
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool
from enginepool.errors import InvalidConfig
from enginepool.serve.openapi_schema import AdminError, Error
from enginepool.serve.options import ServeOptions
from tests.support.servers import Running, serving

SUM = "12+7="


def test_perturb(administered: Running) -> None:
    """The checksum afterwards is `checksum_after`, on every port. The noise depends on the seed."""
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


def test_pause_and_continue(administered: Running, sums: EnginePool) -> None:
    """A paused server is alive and not ready, and answers later. By both sets of names."""
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
    """By the id that the request was sent with. The request keeps its tokens."""
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


def test_off_by_default(plain: Running) -> None:
    with plain.http() as client:
        for path in ("/admin/weights_checksum", "/admin/memory", "/flush_cache"):
            assert client.get(path).status_code == 404
        for path in ("/admin/pause", "/update_weights"):
            reply = client.post(path)
            assert reply.status_code == 404
            assert "start the server with --enable-admin" in reply.json()["message"]


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
    """Without a token, requests that another site's page could have sent are refused."""
    with administered.http(headers=headers) as client:
        for path in ("/admin/pause", "/pause_generation", "/flush_cache"):
            reply = client.post(path)
            assert reply.status_code == 403, path
        assert client.get("/admin/memory").status_code == 403
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200  # nothing was paused


def test_token(sums: EnginePool) -> None:
    """With a token only the token counts, not the API key or the address."""
    with serving(sums, enable_admin=True, admin_token="admin", api_key="key") as running:
        for token, status in (("admin", 200), ("key", 401), ("adm", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with running.http(headers=headers) as client:
                assert client.get("/admin/memory").status_code == status
                named = {"name": "model.norm.weight"}
                assert client.get("/get_weights_by_name", params=named).status_code == status
                read = client.get("/get_model_info")  # this route is no administration
                assert read.status_code == (200 if token == "key" else 401)
                assert client.get("/v1/models").status_code == (200 if token == "key" else 401)
        headers = {"Authorization": "Bearer admin", "Origin": "http://dashboard"}
        with running.http(headers=headers) as client:
            assert client.get("/admin/memory").status_code == 200


def test_key_guards_administration_too(sums: EnginePool) -> None:
    with serving(sums, enable_admin=True, api_key="key") as running:
        assert running.http().get("/admin/memory").status_code == 401
        with running.http(headers={"Authorization": "Bearer key"}) as client:
            assert client.get("/admin/memory").status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies(sums: EnginePool, announced: bool) -> None:
    """413 in the form that the document gives for the route, whether the length was announced or
    not."""
    content = json.dumps({"mode": "1" * 2000}).encode()
    with serving(sums, enable_admin=True, max_body_bytes=1000) as running, running.http() as client:
        schema = client.get("/openapi.json").json()["paths"]
        for path, model in (
            ("/admin/pause", AdminError),
            ("/sleep", AdminError),
            ("/load_lora_adapter", AdminError),
            ("/v1/load_lora_adapter", Error),
            ("/generate", Error),
        ):
            reply = client.post(
                path,
                content=content if announced else iter([content[:900], content[900:]]),
                headers={"Content-Type": "application/json"},
            )
            assert reply.status_code == 413
            told = schema[path]["post"]["responses"]["413"]["content"]["application/json"]["schema"]
            assert told["$ref"].endswith(f"/{model.__name__}")
            assert "at most 1000" in str(model.model_validate(reply.json()))


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
        ({"port": 31000, "engine_ports": (31000,)}, "a port of their own"),
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
