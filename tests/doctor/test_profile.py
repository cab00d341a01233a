"""`enginepool doctor --profile` on a running pool."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import patches
from enginepool.cli.main import app
from enginepool.doctor.profile import profile
from enginepool.doctor.step_profile import SECTIONS, StepProfile, _Clock
from tests.support.pools import MakePool


def test_profile(make_pool: MakePool) -> None:
    """Every step appears with its batch, the sections of a step add up to at most the step, and
    the engine is unchanged afterwards."""
    pool = make_pool("qwen3", 2)
    scheduler = pool.engines[0].scheduler_info["scheduler"]
    owners = scheduler, scheduler.tp_worker, scheduler.tp_worker.worker.model_runner
    pool.engines[0].generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 2})
    before = [set(vars(owner)) for owner in owners]
    report = profile(pool, requests=4, tokens=20)
    assert [set(vars(owner)) for owner in owners] == before
    assert report["steps"] == 20
    assert report["requests_in_batch"] == 4
    assert set(report["sections"]) == set(SECTIONS)
    unused = set() if patches.optimising() else {"join", "launch", "tokens"}
    for key, whole in (("ms", "step_ms"), ("gil_ms", "gil_ms")):
        parts = {name: section[key] for name, section in report["sections"].items()}
        assert {name for name, part in parts.items() if not part > 0} == unused
        assert sum(parts.values()) <= report[whole] * 1.001
    assert 0 < report["gil_ms"] <= report["step_ms"]
    assert report["saturates_at"] >= 1
    assert report["compilations"] == 0


@pytest.mark.parametrize("extend", [True, False])
def test_upstreams_decode_step_is_no_prefill(extend: bool) -> None:
    """One method of upstream's runs prefills and decode steps."""
    mode = SimpleNamespace(is_extend=lambda: extend)
    batch = SimpleNamespace(forward_mode=mode, batch_size=lambda: 2)
    clock = _Clock(StepProfile())
    clock.counted(SimpleNamespace(cur_batch=batch), list)()
    assert (clock.profile.steps, clock.profile.prefills) == (1, extend)


@pytest.mark.slow
def test_command() -> None:
    """As JSON, for the toy."""
    done = CliRunner().invoke(app, ["doctor", "--profile", "--json", "--devices", "1"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout[done.stdout.index("{") :])["steps"] == 64
