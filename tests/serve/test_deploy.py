"""Flags, ports, paths and metrics in `deploy/` exist, and grace periods fit the drain."""

import configparser
import json
import math
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from enginepool.cli.main import app
from enginepool.serve.error_replies import CLIENT_GONE
from enginepool.serve.history import _NO_FAULT
from enginepool.serve.options import ServeOptions
from enginepool.serve.record import outcome_of
from tests.cli.test_config_file import read
from tests.support.servers import Running, generate

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXITS = 25  # seconds after the drain: for outputs that were cut, connections and the interpreter


def objects(file: str = "kubernetes.yaml") -> dict[str, Any]:
    """By kind. A second Service is by its name."""
    found: dict[str, Any] = {}
    for one in yaml.safe_load_all((DEPLOY / file).read_text()):
        found[one["metadata"]["name"] if one["kind"] in found else one["kind"]] = one
    return found


def container(file: str = "kubernetes.yaml") -> dict[str, Any]:
    (one,) = objects(file)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def dockerfile() -> dict[str, list[str]]:
    """The arguments of each instruction, with continued lines joined."""
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
    """`serve.yaml` and the one in Kubernetes agree in the options that the latter has."""
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


def test_many_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod is the single host's pod with administration. A name resolves to the addresses of
    all pods."""
    one, many = container(), container("kubernetes-hosts.yaml")
    for name in ("args", "ports", "resources", "startupProbe", "readinessProbe", "livenessProbe"):
        assert many[name] == one[name]
    every = objects("kubernetes-hosts.yaml")
    deployment = every["Deployment"]["spec"]
    pod = deployment["template"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in many["volumeMounts"]} == volumes
    grace = objects()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == grace
    hosts = every["enginepool-hosts"]["spec"]
    assert hosts["clusterIP"] == "None"
    for selector in (hosts["selector"], every["Service"]["spec"]["selector"]):
        assert selector == pod["metadata"]["labels"] == deployment["selector"]["matchLabels"]
    config = every["ConfigMap"]["data"]["serve.yaml"]
    said = yaml.safe_load(config)
    mounts = {mount["mountPath"] for mount in many["volumeMounts"]}
    assert said["model_root"] in mounts
    assert Path(said["model"]).parent == Path(said["model_root"])
    in_pod = tmp_path / "serve.yaml"
    in_pod.write_text(config.replace(said["model_root"], str(tmp_path)))
    own = read("--config", str(in_pod))[0]
    assert (own["enable_admin"], own["port"]) == (True, hosts["ports"][0]["port"])
    (command,) = re.findall(
        r"enginepool (admin .*\n.*)\n", (DEPLOY / "kubernetes-hosts.yaml").read_text()
    )
    words = shlex.split(command.replace("\\\n#", ""))
    assert f"http://enginepool-hosts:{own['port']}" in words
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("10.0.0.5", 0))])
    shown = CliRunner().invoke(app, [*words, "--help"])
    assert shown.exit_code == 0, shown.output


def ray_groups() -> list[dict[str, Any]]:
    (cluster,) = yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text())
    assert cluster["kind"] == "RayCluster"
    spec = cluster["spec"]
    assert f"ray=={spec['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    return spec["workerGroupSpecs"]


@pytest.mark.parametrize("group", ray_groups(), ids=lambda group: group["groupName"])
def test_ray_cluster(group: dict[str, Any]) -> None:
    """Each host has all of its chips. On a slice of several hosts a process uses only its own."""
    pod = group["template"]["spec"]
    (one,) = pod["containers"]
    asked, limits = one["resources"]["requests"], one["resources"]["limits"]
    chips = asked["google.com/tpu"]
    assert {name: asked[name] for name in limits} == limits
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == chips * group["numOfHosts"]
    assert group["groupName"] == f"v5e-{chips * group['numOfHosts']}"
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in one["volumeMounts"]} == volumes
    variables = {each["name"]: each["value"] for each in one.get("env", ())}
    if group["numOfHosts"] == 1:
        assert not variables
        return
    bounds = variables["TPU_CHIPS_PER_PROCESS_BOUNDS"].split(",")
    assert math.prod(map(int, bounds)) == chips
    assert variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert variables["TPU_VISIBLE_CHIPS"] == ",".join(map(str, range(chips)))
    assert variables["RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS"] == "1"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables belong to options."""
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


def test_dashboard_counts_the_failed_requests_of_the_page() -> None:
    """A client that leaves is no failed request."""
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    (query,) = [one["targets"][0]["expr"] for one in panels if one["title"] == "Failed requests"]
    (good,) = re.findall(r'outcome=~"([^"]*)"', query)
    outcomes = {outcome_of(200, None), outcome_of(CLIENT_GONE, None)}
    assert set(good.split("|")) == outcomes == set(_NO_FAULT)


def test_dashboard(plain: Running) -> None:
    """Every metric and label that it uses is in `/metrics`."""
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
    labels.add("phase")  # updates have it, and there was none
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
