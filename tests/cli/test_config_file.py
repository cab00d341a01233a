"""`serve --config FILE`, and `serve --help-all`."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from enginepool.cli.config_file import left_to_upstream
from enginepool.cli.main import app
from enginepool.cli.server_args import parse_upstream_flags

YAML = """
model: some/model
port: 31000
devices: [2]
ports: [31001]
restart: false
enable-admin: true
admin_token: of the file
max_body_bytes: null
dtype: float32
chunked-prefill-size: -1
precompile_bs_paddings: [1, 8]
trust_remote_code: true
json_model_override_args: {rope_theta: 1}
"""
TOML = """
model = "some/model"
port = 31000
devices = [2]
ports = [31001]
restart = false
enable-admin = true
admin_token = "of the file"
dtype = "float32"
chunked-prefill-size = -1
precompile_bs_paddings = [1, 8]
trust_remote_code = true
json_model_override_args = {rope_theta = 1}
"""


def read(*args: str) -> tuple[dict[str, Any], str | None, dict[str, Any]]:
    """The command's own options, the model, and upstream's, as `serve` has them."""
    command: Any = typer.main.get_command(app)
    context = command.commands["serve"].make_context("serve", list(args))
    return context.params, *parse_upstream_flags(context.args, left_to_upstream(context))


def written(directory: Path, text: str, name: str = "serve.yaml") -> str:
    path = directory / name
    path.write_bytes(text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serve.yaml", YAML),
        ("serve.toml", TOML),
        # As editors on Windows write it.
        ("serve.yaml", "\ufeff" + YAML.replace("\n", "\r\n")),
        ("serve.toml", "\ufeff" + TOML.replace("\n", "\r\n")),
    ],
)
def test_a_file_sets_what_flags_set(tmp_path: Path, name: str, text: str) -> None:
    by_file = read("--config", written(tmp_path, text, name))
    by_flags = read(
        *("some/model", "--port", "31000", "--devices", "2,", "--ports", "31001,", "--no-restart"),
        *("--enable-admin", "--admin-token", "of the file", "--dtype", "float32"),
        *("--chunked-prefill-size", "-1", "--precompile-bs-paddings", "1", "8"),
        *("--trust-remote-code", "--json-model-override-args", '{"rope_theta": 1}'),
    )
    assert by_file[0].pop("config") == tmp_path / name
    assert by_flags[0].pop("config") is None
    assert by_file == by_flags


def test_the_command_line_and_the_environment_go_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, YAML)
    monkeypatch.setenv("ENGINEPOOL_ADMIN_TOKEN", "of the environment")
    own, model, upstream = read("--config", path, "--port", "5", "--restart", "--dtype", "bfloat16")
    assert (own["port"], own["restart"], own["devices"]) == (5, True, "2,")
    assert own["admin_token"] == "of the environment"
    assert (model, upstream["dtype"], upstream["chunked_prefill_size"]) == (
        "some/model", "bfloat16", -1,
    )  # fmt: skip
    assert read("other", "--config", path)[1] == "other"
    assert read("--model-path", "other", "--config", path)[1] == "other"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prot: 5", "unknown option prot=5; did you mean port?"),
        ("dtyp: float32", "did you mean dtype?"),
        ("config: other.yaml", "unknown option config='other.yaml'"),
        ("dtype: float33", "invalid choice"),
        ("trust_remote_code: 1", "trust_remote_code=1: expected true or false"),
        ("enable_admin: 'yes'", "enable_admin='yes': expected true or false"),
        ("port: true", "port=True: expected its value"),
        ("host: {a: 1}", "expected one value"),
        ("dp_size: 2", "dp_size=2"),
        ("- port", "expected options by name, not ['port']"),
        ("port: [", "this is not YAML"),
        ("port: 1\nhost: a\nport: 2", "'port' is there twice"),
        ("drain-timeout: 1\ndrain_timeout: 2", "drain_timeout is there twice"),
        ("dtype: float32\n'dtype': bfloat16", "'dtype' is there twice"),
        ("model: a\nmodel-path: b", "model and model_path are one option; give one of them"),
        ("tp_size: 1\ntensor_parallel_size: 2", "tp_size and tensor_parallel_size are one option"),
        ("revision: 2026-13-01", "month must be in 1..12"),
    ],
)
def test_a_file_with_invalid_options(tmp_path: Path, text: str, why: str) -> None:
    """The error is one line, with exit code 2, before anything is built."""
    result = CliRunner().invoke(app, ["serve", "--config", written(tmp_path, text)])
    assert result.exit_code == 2, result.output
    assert why in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serve.yaml", "revision: 2026-11-29\nmodel_root: 2026-11-29"),
        ("serve.toml", "revision = 2026-11-29\nmodel_root = 2026-11-29"),
    ],
)
def test_a_date_is_text(tmp_path: Path, name: str, text: str) -> None:
    """YAML and TOML read it as a date. Options take its text."""
    own, _, upstream = read("--config", written(tmp_path, text, name))
    assert upstream["revision"] == "2026-11-29"
    assert own["model_root"] == Path("2026-11-29")


@pytest.mark.parametrize(
    ("name", "why"), [("none.yaml", "No such file"), ("serve.ini", "expected a name in .toml")]
)
def test_a_missing_file_and_one_of_another_format(tmp_path: Path, name: str, why: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / name)])
    assert result.exit_code == 2
    assert why in result.output


def test_help_all_has_upstreams_flags() -> None:
    """The flags of upstream's HTTP server are the command's own. Flags that a pool refuses are
    not shown."""
    shown = CliRunner().invoke(app, ["serve", "--help-all"]).output
    assert "--drain-timeout" in shown
    upstream = shown[shown.index("\noptions:") :]
    for flag in ("--chunked-prefill-size", "--attention-backend"):
        assert f"\n  {flag}" in upstream
    for flag in ("--host", "--dp-size", "--speculative-", "--lora-paths"):
        assert f"\n  {flag}" not in upstream
    assert "--help-all" in CliRunner().invoke(app, ["serve", "--help"]).output
