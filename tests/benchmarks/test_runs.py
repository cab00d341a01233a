"""Benchmarks run, and print and write what their docstrings promise."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import CORES, limited_by_cores
from benchmarks.contestant import Contestant
from benchmarks.fuzz_law import Law
from benchmarks.soak_checks import check_early_end, check_modes
from benchmarks.span_checks import Finished, check_spans, check_tokens
from enginepool.toy.files import END_ID
from tests.support.reference import make_random_model, reference_greedy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_busy_benchmark_counts_the_devices_steps(tmp_path):
    """A simulated device is never busier than all of the time."""
    file = tmp_path / "figures.json"
    options = ["--engines", 2, "--step-ms", 3, "--batch", 2, "--tokens", 12, "--rounds", 1]
    workloads = ["decode", "arrivals", "sampled", "grammars"]
    printed = run("benchmarks.busy", *options, "--workload", *workloads, "--json", file)
    assert "arrivals, batches of 2" in printed
    assert "fell back" in printed
    rows = json.loads(file.read_text())["rows"]
    names = ("pool", "ceiling", "processes")
    assert [(row["workload"], row["name"]) for row in rows] == [
        (workload, name)
        for workload in workloads
        for name in names
        if (workload, name) != ("grammars", "processes")
    ]
    for row in rows:
        assert 0 < row["busy_share"] <= 1
        assert row["tokens_per_sec"] < row["engines"] * 2 / 0.003 + 1
        if row["name"] != "ceiling" and row["workload"] != "arrivals":
            assert row["tokens"] == 2 * 2 * 12
        if row["name"] == "pool" and row["workload"] != "arrivals":
            assert row["fallback_share"] == 0


def test_an_accelerator_is_not_simulated_without_a_compiler(tmp_path):
    script = "from benchmarks import simulated; simulated.install()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "this host has no compiler (c++, g++ or clang++ in PATH): install one" in done.stderr


def test_a_contestant_that_ends_says_why(tmp_path, monkeypatch):
    """The error has the last lines of its standard error."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as raised:
        Contestant("pool", tmp_path / "model", {}, engines=1)
    first, *lines = str(raised.value).splitlines()
    assert first == "pool: a process ended with status 1:"
    assert "this host has no compiler" in lines[-1]


@pytest.mark.parametrize(("engines", "limited"), [(1, False), (100, True)])
def test_a_point_with_too_few_cores_is_marked(engines, limited):
    step_ms = 10.0
    cpu_ms = 0.01 * CORES * step_ms
    assert limited_by_cores(engines, cpu_ms, step_ms) is limited


def run(*arguments: Any) -> str:
    """The output of a benchmark, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_startup_benchmark_opens_the_pools_that_it_says(tmp_path):
    """It opens the numbers of engines asked for, and measures all engines and the first token."""
    file = tmp_path / "figures.json"
    model = make_random_model(tmp_path, "qwen3", num_layers=1)
    options = ["--engines", 1, 2, "--rounds", 1, "--model", model, "--json", file]
    printed = run("benchmarks.startup", *options)
    assert "programs compiled" in printed
    runs = json.loads(file.read_text())["runs"]
    assert list(runs) == ["1", "2"]
    for engines, kinds in runs.items():
        ((cold,), (warm,)) = kinds["cold"], kinds["warm"]
        for kind in ("cold", "warm"):
            assert kinds[f"upstream {kind}"][0]["seconds"] > 0
        for one in (cold, warm):
            assert len(one["build"]) == len(one["warmup"]) == int(engines)
            assert one["seconds"] > sum(one["build"]) + sum(one["warmup"])
        assert cold["programs"] > 0


def test_weight_update_benchmark_counts_the_hosts_time(tmp_path):
    """Many tiny leaves: a row for each source, with plain JAX beside it where anything moves."""
    file = tmp_path / "figures.json"
    options = ["--leaves", 30, "--engines", 2, "--rounds", 1, "--json", file]
    printed = run("benchmarks.weight_update", *options)
    assert "decode meanwhile" in printed
    figures = json.loads(file.read_text())
    assert (figures["leaves"], figures["engines"]) == (25, 2)
    assert len(figures["rows"]) == 9
    for row in figures["rows"]:
        assert min(row["stage_cpu"], row["update_cpu"]) > 0
        assert ("plain_cpu" in row) == (row["name"] != "own layout, on every device")
        assert row["decode_share"] > 0


def test_weight_update_benchmark_moves_what_it_says(tmp_path):
    """Every source brings the same weights. It moves as many bytes as plain JAX does."""
    file = tmp_path / "figures.json"
    options = ["--size-gb", 0.005, "--engines", 2, "--rounds", 1, "--json", file]
    printed = run("benchmarks.weight_update", *options)
    assert "peer/sum" in printed
    figures = json.loads(file.read_text())
    rows = figures["rows"]
    sets = [2, 1, 0, 2, 2, 2, 2]
    assert [row["gb"] * 1e9 for row in rows] == pytest.approx([n * figures["nbytes"] for n in sets])
    assert len({row["fingerprint"] for row in rows}) == 1
    leaves = rows[0]["copied"]
    assert [(row["copied"], row["shared"]) for row in rows[:3]] == [
        (leaves, 0),
        (leaves / 2, leaves / 2),
        (0, leaves),
    ]
    for row in rows:
        assert row["ours"] == pytest.approx(row["stage"] + row["commit"])
        assert row["total"] > row["ours"]
        assert ("of_peer" in row) == (row["gb"] > 0)
    kinds = {(row["mode"], row["engine_index"]) for row in figures["pauses"]}
    assert kinds == {
        (mode, engine) for mode in ("retract", "in_place", "drain") for engine in (0, 1)
    }
    for row in figures["pauses"]:
        assert 0 < row["pause"] <= row["longest"]
        assert row["steps"] == pytest.approx(row["pause"] / row["step"])


def finished(ids: list[int], spans: list[list[int]], kind: str = "length") -> Finished:
    meta = {
        "id": "x",
        "weight_versions": spans,
        "completion_tokens": len(ids),
        "prompt_weight_versions": [span[2] for span in spans[:1]],
        "finish_reason": {"type": kind},
    }
    return Finished([5, 6, 7], {"output_ids": ids, "meta_info": meta})


@pytest.mark.parametrize(
    "spans",
    [[[0, 3, 1]], [[1, 4, 1]], [[0, 2, 1], [3, 4, 2]], [[0, 3, 1], [2, 4, 2]], []],
)
def test_soak_notices_spans_that_do_not_cover_an_output(spans):
    assert check_spans(finished([1, 2, 3, 4], spans))
    assert not check_spans(finished([1, 2, 3, 4], [[0, 2, 1], [2, 4, 2]]))


def test_soak_notices_versions_that_a_mode_rules_out():
    modes = dict.fromkeys(range(5), "drain")
    assert check_modes(finished([1, 2, 3, 4], [[0, 2, 1], [2, 4, 2]]), modes)
    assert not check_modes(finished([1, 2, 3, 4], [[0, 4, 1]]), modes)


def test_soak_notices_an_output_that_nobody_ended():
    aborted = finished([1, 2, 3, 4], [[0, 4, 1]], "abort")
    assert check_early_end(aborted, ("by its caller",))
    aborted.reason["message"] = "by its caller"
    assert not check_early_end(aborted, ("by its caller",))


WRONG_STOPS: dict[str, dict[str, Any]] = {
    "with token 4 of 5": {"ids": b"zabca", "text": "z"},
    "without a reason": {"ids": b"zab"},
    "log-probabilities": {"logprobs": b"zab"},
    "its ids": {"text": "za"},
}


@pytest.mark.parametrize("wrong", WRONG_STOPS)
def test_soak_notices_where_a_stop_string_should_end_an_output(tmp_path, wrong):
    law = Law(make_random_model(tmp_path, "qwen3"), {END_ID})
    params = {"max_new_tokens": 8, "stop": ["abc"], "ignore_eos": True}

    def look(ids: bytes = b"zabc", text: str = "z", logprobs: bytes | None = None) -> list[str]:
        one = finished(list(ids), [[0, len(ids), 1]])
        one.result["text"] = text
        one.result["meta_info"] |= {
            "finish_reason": {"type": "stop", "matched": "abc"},
            "output_token_logprobs": [(-1.0, token, None) for token in logprobs or ids],
        }
        return law.faults(one, params)

    assert look() == []
    assert wrong in " ".join(look(**WRONG_STOPS[wrong]))


def test_soak_notices_tokens_of_other_weights(tmp_path):
    models = [make_random_model(tmp_path / str(n), "qwen3", seed=n) for n in range(2)]
    greedy = reference_greedy(models[0], [5, 6, 7], 8)

    def model_of(version: int, adapter: int | None) -> Path:
        return models[version if adapter is None else adapter]

    def adapted(*spans: list[int]) -> Finished:
        one = finished(greedy.ids, [[0, 8, 3]])
        one.result["meta_info"] |= {"lora_path": "a", "lora_versions": list(spans)}
        return one

    assert not check_tokens([adapted([0, 8, 0])], model_of).violations
    right = check_tokens([finished(greedy.ids, [[0, 8, 0]])], model_of)
    assert not right.violations
    assert right.tokens + right.ties == 8
    assert right.ties == sum(gap < 1e-3 for gap in greedy.gaps)
    for wrong in (
        finished(greedy.ids, [[0, 8, 1]]),
        finished(greedy.ids, [[0, 4, 0], [4, 8, 1]]),
        finished([*greedy.ids[:-1], (greedy.ids[-1] + 1) % 256], [[0, 8, 0]]),
        adapted([0, 8, 1]),
        adapted([0, 4, 0], [4, 8, 1]),
    ):
        assert check_tokens([wrong], model_of).violations
