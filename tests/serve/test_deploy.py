"""What `deploy/` names exists: flags, ports, paths, metrics; and graces fit the drain."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from enginepool.serve.options import ServeOptions
from tests.cli.test_config_file import read
from tests.support.servers import Running, generate

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXITS = 25  # seconds after the drain: what it cut hands over what it has, connections, interpreter


def objects() -> dict[str, Any]:
    every = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in every}


def container() -> dict[str, Any]:
    (one,) = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def dockerfile() -> dict[str, list[str]]:
    """Arguments of each instruction, lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            found.setdefault(instruction, []).append(rest.strip())
    return found


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "enginepool.service")
    return parser


def test_the_files_options_are_taken(tmp_path: Path) -> None:
    """`serve.yaml` and the one in Kubernetes say the same, as far as the latter says anything."""
    shipped, model, upstream = read("--config", str(DEPLOY / "serve.yaml"))
    assert model
    assert upstream == {"dtype": "bfloat16"}
    assert shipped["drain_timeout"] == ServeOptions.drain_timeout
    in_pod = tmp_path / "serve.yaml"
    in_pod.write_text(objects()["ConfigMap"]["data"]["serve.yaml"])
    assert {*yaml.safe_load(in_pod.read_text()).items()} <= {
        *yaml.safe_load((DEPLOY / "serve.yaml").read_text()).items()
    }
    assert read("--config", str(in_pod))[0]["port"] == shipped["port"]


def test_kubernetes(plain: Running) -> None:
    pod = objects()["Deployment"]["spec"]["template"]
    one = container()
    port = yaml.safe_load(objects()["ConfigMap"]["data"]["serve.yaml"])["port"]
    ports = {p["name"]: p["containerPort"] for p in one["ports"]}
    assert ports == {"http": port}
    (served,) = objects()["Service"]["spec"]["ports"]
    assert served["targetPort"] in ports
    labels = pod["metadata"]["labels"]
    assert objects()["Service"]["spec"]["selector"] == labels
    assert objects()["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    scraped = pod["metadata"]["annotations"]
    assert scraped["prometheus.io/port"] == str(port)
    (mount,) = one["volumeMounts"]
    assert one["args"] == ["--config", f"{mount['mountPath']}/serve.yaml"]
    paths = {
        one[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    with plain.http() as client:
        for path in paths | {scraped["prometheus.io/path"]}:
            assert client.get(path).status_code == 200
    stop = int(one["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace >= stop + ServeOptions.drain_timeout + EXITS


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those of options."""
    named = {one["name"] for one in container()["env"]}
    named |= set(re.findall(r"ENGINEPOOL_\w+", (DEPLOY / "enginepool.service").read_text()))
    for name in named:
        monkeypatch.setenv(name, f"value of {name}")
    own = read("--enable-admin")[0]
    assert {f"value of {name}" for name in named} <= {*map(str, own.values())}


def test_dockerfile() -> None:
    said = dockerfile()
    (entry,) = map(json.loads, said["ENTRYPOINT"])
    assert entry[:2] == ["enginepool", "serve"]
    assert read(*entry[2:])[0]["host"] == "0.0.0.0"
    assert said["EXPOSE"] == [str(ServeOptions.port)]
    assert f":{ServeOptions.port}/health" in said["HEALTHCHECK"][0]
    for copied in said["COPY"]:
        for name in copied.split()[:-1]:
            assert (ROOT / name).exists()
    extras = (ROOT / "pyproject.toml").read_text()
    for platform in ("cpu", "tpu"):
        assert f'{platform} = ["sglang-jax[{platform}]"]' in extras
    asked = re.findall(r"--stop-timeout (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert asked
    assert all(int(seconds) >= ServeOptions.drain_timeout + EXITS for seconds in asked)


def test_systemd() -> None:
    service = unit()["Service"]
    program, command, *flags = shlex.split(service["ExecStart"])
    assert (Path(program).name, command, flags[0]) == ("enginepool", "serve", "--config")
    assert (DEPLOY / Path(flags[1]).name).exists()
    assert int(service["TimeoutStopSec"]) >= ServeOptions.drain_timeout + EXITS


def test_dashboard(plain: Running) -> None:
    """Every metric and label that it asks for is in `/metrics`."""
    with plain.http() as client:
        generate(client, "12+7=")
        text = client.get("/metrics").text
    names, labels = set(), {"job", "le"}
    for family in text_string_to_metric_families(text):
        ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        names |= {family.name + end for end in ends.get(family.type, ("",))}
        for sample in family.samples:
            names.add(sample.name)
            labels |= sample.labels.keys()
    labels.add("phase")  # of an update, and there was none
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    asked = set()
    for query in queries:
        assert query.count("(") == query.count(")")
        asked |= set(re.findall(r"enginepool:\w+", query))
        for by in re.findall(r"by \(([^)]*)\)", query):
            assert set(by.split(", ")) <= labels
        for matched in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", matched)) <= labels
    assert asked <= names
    latencies = {name for name in names if name.endswith("_seconds_bucket")}
    assert {n for n in latencies if "weight_update" not in n} <= asked
