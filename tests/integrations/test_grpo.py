"""examples/grpo.py as its users run it, for a few steps."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from enginepool import EnginePool, toy
from tests.support.liveness import SECONDS, callers

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


def run(out: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    command = [sys.executable, SCRIPT, "--out", out, "--prompts", "16", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * SECONDS)
    assert done.returncode == 0, done.stderr
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def two_steps(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "--steps", "2", "--devices", "2")


def test_on_policy(two_steps: list[dict[str, Any]]) -> None:
    """Every token is of the newest weights, and trainer and engines agree on each."""
    first, second, end = two_steps
    assert [first["versions"], second["versions"]] == [[0], [1]]
    for row in (first, second):
        assert row["ratio"]["mean"] == pytest.approx(1, abs=1e-3)
        assert row["ratio"]["min"] == pytest.approx(1, abs=1e-3)
        assert row["ratio"]["max"] == pytest.approx(1, abs=1e-3)
        assert 0.1 < row["reward"] < 0.9
    assert first["kl_to_start"] < 1e-6 < second["kl_to_start"]
    assert 0.1 < end["held_out"] < 0.9


@pytest.mark.slow
def test_resumed_on_other_engines(two_steps: list[dict[str, Any]], tmp_path: Path) -> None:
    """Samples do not depend on the engines. A run that resumes from its checkpoint gives what an
    uninterrupted run gives. Its log has every step once, even if the kill came after the next step
    and before its checkpoint."""
    first, _ = run(tmp_path, "--steps", "1", "--devices", "1")
    assert first["samples"] == two_steps[0]["samples"]
    assert first["reward"] == two_steps[0]["reward"]
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 1}\n')
    rows = run(tmp_path, "--steps", "2", "--devices", "4", "--resume")
    assert rows[0] == first
    assert [row["step"] for row in rows] == [0, 1, 2]
    again = rows[1]
    assert again["samples"] == two_steps[1]["samples"]
    assert again["versions"] == [1]


def test_a_folder_with_checkpoints_is_refused(
    two_steps: list[dict[str, Any]], folder: Path
) -> None:
    """Without --resume. Otherwise the checkpoints would stay those of the first run."""
    command = [sys.executable, SCRIPT, "--out", folder, "--prompts", "16", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * SECONDS)
    assert done.returncode == 1
    assert f"{folder / 'checkpoints'} has checkpoints" in done.stderr
    assert "--resume" in done.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == two_steps


@pytest.mark.slow
def test_one_step_off_policy(tmp_path: Path) -> None:
    """Tokens are of the newest weights or of those before, and their spans say which."""
    *rows, _ = run(tmp_path, "--steps", "3", "--devices", "2", "--async")
    for row in rows:
        assert set(row["versions"]) <= {row["step"] - 1, row["step"]}
    assert any(row["step"] - 1 in row["versions"] for row in rows)


@pytest.mark.slow
def test_truncated_samples(tmp_path: Path) -> None:
    """With masks, trainer and engines agree on the probabilities among the ids that top-p left."""
    first, second, _ = run(tmp_path, "--steps", "2", "--devices", "2", "--top-p", "0.5", "--masks")
    for row in (first, second):
        assert row["ratio"]["min"] == pytest.approx(1, abs=1e-3)
        assert row["ratio"]["max"] == pytest.approx(1, abs=1e-3)
    assert first["kl_to_start"] < 1e-6 < second["kl_to_start"]


@pytest.mark.slow
def test_adapter(tmp_path: Path) -> None:
    """With --lora an adapter is trained, and every token is of its newest version."""
    options = ["--steps", "2", "--devices", "2", "--lora", "4"]
    first, second, _ = run(tmp_path, *options)
    assert [first["versions"], second["versions"]] == [[0], [1]]
    for row in (first, second):
        assert row["ratio"]["min"] == pytest.approx(1, abs=1e-3)
        assert row["ratio"]["max"] == pytest.approx(1, abs=1e-3)
    assert first["kl_to_start"] < 1e-6 < second["kl_to_start"]
    rows = run(tmp_path, *options[:-2], "--steps", "3", "--lora", "4", "--resume")
    assert rows[-2]["versions"] == [2]
    assert rows[-2]["ratio"]["max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_two_trainers_of_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trainer has its own adapter and its own reward. Both rewards rise, and every token is
    of its trainer's newest adapter, in batches of both."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    grpo, trained = importlib.import_module("grpo"), importlib.import_module("grpo_policy")
    options = grpo.arguments(["--steps", "40", "--evaluate-every", "100"])
    policies = {name: trained.Adapter(8, name) for name in ("sum", "even")}

    def even(pair: Any, result: dict[str, Any]) -> float:
        return float(result["text"][-1:] in tuple("02468"))

    def rewards(pool: EnginePool, name: str, reward: Any) -> list[float]:
        trainer = grpo.Trainer(
            policies[name], jax.devices()[:2], toy.checkpoint("half"), 2e-3, options.steps, 1
        )
        begin, seen = trainer.start(), []
        policies[name].give(pool, begin.params, 0)
        rollouts = grpo.Rollouts(pool, policies[name], options, reward)
        for step, _, metrics in grpo.train(rollouts, trainer, options, begin, 0):
            assert metrics["versions"] == [step]
            assert metrics["ratio"]["min"] == pytest.approx(1, abs=2e-3)
            assert metrics["ratio"]["max"] == pytest.approx(1, abs=2e-3)
            seen.append(metrics["reward"])
        return seen

    model, lora = str(toy.checkpoint("half")), policies["sum"].pool_options
    with (
        EnginePool(model, devices=2, dtype="float32", context_length=64, **lora) as pool,
        callers(2) as threads,
    ):
        before = pool.checksum()
        calls = [
            threads.submit(rewards, pool, name, reward)
            for name, reward in (("sum", grpo.reward), ("even", even))
        ]
        sums, evens = (call.result() for call in calls)
        assert pool.checksum() == before
    assert sum(sums[-5:]) > sum(sums[:5]) + 0.5
    assert sum(evens[-5:]) > sum(evens[:5]) + 0.5


@pytest.mark.slow
def test_int8(tmp_path: Path) -> None:
    """The engines' probabilities are close to the trainer's, but not equal."""
    *rows, _ = run(
        tmp_path, "--steps", "2", "--devices", "2", "--int8", "--correction", "truncated"
    )
    for row in rows:
        assert row["ratio"]["mean"] == pytest.approx(1, abs=0.05)
        assert 1e-7 < row["kl_to_rollout"] < 0.01
