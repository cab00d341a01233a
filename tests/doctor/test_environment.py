"""The doctor's checks without a TPU, and one run on this machine."""

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from enginepool.cli.main import app
from enginepool.config import PoolConfig
from enginepool.doctor import environment
from enginepool.doctor.tpu_warnings import warnings
from enginepool.sizing.chips import V4, V5E, V6E
from tests.support.published import CONFIGS

HOLDER = {"pid": 123, "command": "python train.py", "files": ["/dev/accel0"]}
HEALTHY = {
    "versions": {"sglang-jax": "0.1.0rc0"},
    "jax": {"backend": "tpu", "processes": 1, "devices": []},
    "tpu": {"holders": [], "processes_not_readable": 0, "lock_file": None},
    "patches": [{"name": "min_p", "issue": "not reported", "needed": True}],
    "environment": {},
}


def process(proc, pid, command, *files):
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in command) + b"\0")
    for number, file in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(file)


def test_holders_are_the_processes_with_a_chip_or_the_lock_file_open(tmp_path):
    process(tmp_path, 7, ["python", "train.py"], "/dev/null", "/dev/accel0", "/dev/accel1")
    process(tmp_path, 8, ["serve"], "/dev/vfio/3")
    process(tmp_path, 9, ["bash"], "/dev/null", "/tmp/other")
    process(tmp_path, 10, ["waits"], str(environment.LOCK_FILE))
    (tmp_path / "11").mkdir()  # ended meanwhile
    (tmp_path / "self").mkdir()
    assert environment.device_holders(tmp_path) == (
        [
            {"pid": 7, "command": "python train.py", "files": ["/dev/accel0", "/dev/accel1"]},
            {"pid": 8, "command": "serve", "files": ["/dev/vfio/3"]},
            {"pid": 10, "command": "waits", "files": [str(environment.LOCK_FILE)]},
        ],
        0,
    )


def test_a_holder_that_closes_another_file_meanwhile(tmp_path, monkeypatch):
    process(tmp_path, 7, ["python"], "/tmp/closed", "/dev/accel0")
    read = os.readlink

    def readlink(path):
        if (link := read(path)) == "/tmp/closed":
            raise FileNotFoundError(path)
        return link

    monkeypatch.setattr(os, "readlink", readlink)
    [holder], _ = environment.device_holders(tmp_path)
    assert holder["files"] == ["/dev/accel0"]


def test_a_command_line_in_another_encoding(tmp_path):
    """It is shown, with a mark for each byte that is no UTF-8."""
    process(tmp_path, 7, ["python"], "/dev/accel0")
    (tmp_path / "7" / "cmdline").write_bytes(b"python\0caf\xe9.py\0")
    [holder], _ = environment.device_holders(tmp_path)
    assert holder["command"] == "python caf\ufffd.py"


@pytest.mark.parametrize(
    ("holders", "hidden", "state"),
    [([], 0, "stale"), ([], 3, "unknown"), ([HOLDER], 0, "held"), ([HOLDER], 3, "held")],
)
def test_lock_file_is_stale_when_nothing_can_hold_it(tmp_path, holders, hidden, state):
    path = tmp_path / "lock"
    assert environment.lock_file(path, holders, hidden) is None
    path.touch()
    assert environment.lock_file(path, holders, hidden) == {"path": str(path), "state": state}


def test_jax_that_does_not_start_is_given_up():
    waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert environment.start_jax(waits, timeout=0.1) == {"error": "JAX did not start within 0.1 s"}


def test_jax_that_fails_says_why():
    fails = [sys.executable, "-c", "raise RuntimeError('the TPU is already in use')"]
    assert environment.start_jax(fails, 60) == {"error": "RuntimeError: the TPU is already in use"}


def test_what_is_printed_before_the_findings_is_ignored():
    prints = [sys.executable, "-c", "print('hello'); print('{\"backend\": \"tpu\"}')"]
    assert environment.start_jax(prints, 60) == {"backend": "tpu"}


def test_nothing_wrong_means_no_problems():
    assert environment.problems(HEALTHY) == []


def test_held_tpu_names_the_process_and_how_to_end_it():
    tpu = {"holders": [HOLDER], "processes_not_readable": 0, "lock_file": None}
    report = HEALTHY | {"tpu": tpu, "jax": {"error": "JAX did not start within 60 s"}}
    first, second = environment.problems(report)
    assert first["problem"] == "process 123 holds the TPU (python train.py)"
    assert "kill 123" in first["remedy"]
    assert second == {
        "problem": "JAX did not start within 60 s",
        "remedy": "free the TPU as said above",
    }


def test_stale_lock_file_is_to_be_removed():
    lock = {"path": "/tmp/libtpu_lockfile", "state": "stale"}
    tpu = {"holders": [], "processes_not_readable": 0, "lock_file": lock}
    (problem,) = environment.problems(HEALTHY | {"tpu": tpu})
    assert problem["remedy"] == "rm -f /tmp/libtpu_lockfile"


def test_environment_that_cannot_hold_in_a_pool_is_a_problem():
    (problem,) = environment.problems(HEALTHY | {"environment": {"SGLANG_JAX_AOT_DISPATCH": "1"}})
    assert problem["remedy"] == "unset SGLANG_JAX_AOT_DISPATCH"


def live(chip, used=0, count=4):
    """What JAX reports on a host with these chips."""
    memory = {"bytes_limit": chip.hbm_bytes, "bytes_in_use": used}
    devices = [
        {"id": i, "platform": "tpu", "kind": chip.kind, "memory": memory} for i in range(count)
    ]
    return {"backend": "tpu", "processes": 1, "devices": devices}


def warned(jax, model, **server_args):
    found = warnings(jax, PoolConfig(CONFIGS[model], server_args=server_args))
    return [f"{entry['problem']} → {entry['remedy']}" for entry in found]


def test_settings_that_a_tpu_takes_need_no_warning():
    assert warned(live(V6E), "4B", context_length=4096) == []
    assert warnings(live(V6E), None) == []


def test_settings_do_not_matter_without_a_tpu():
    jax = {"backend": "cpu", "devices": [{"kind": "cpu", "memory": None}]}
    assert warned(jax, "4B", page_size=1) == []
    assert warned({"error": "JAX did not start within 60 s"}, "4B", page_size=1) == []


def test_settings_that_a_tpu_refuses_are_warned_of():
    """The page size, the limit on running requests, and room for a second weight set."""
    asked = {"context_length": 4096, "page_size": 1, "max_running_requests": 64}
    page, cap = warned(live(V6E), "0.6B", **asked)
    assert "page_size=1" in page
    assert "at most 32" in cap
    (second,) = warned(live(V5E), "4B", context_length=4096)
    assert "second weight set does not fit" in second
    assert 'staging="stream"' in second
    (weights,) = warned(live(V5E), "8B", context_length=4096)
    assert "less than one request" in weights


def test_memory_that_others_hold_counts():
    """A trainer on the chip takes up the memory of a second set."""
    assert warned(live(V6E), "4B", context_length=4096) == []
    (second,) = warned(live(V6E, used=14 * 2**30), "4B", context_length=4096)
    assert "second weight set does not fit" in second


def test_a_chip_that_does_not_count_is_sized_by_its_kind():
    jax = live(V5E)
    for device in jax["devices"]:
        device["memory"] = None
    assert "in 16.91" in warned(jax, "8B", context_length=4096)[0]


def test_a_chip_that_enginepool_never_ran_on_is_reported():
    (note,) = warned(live(V4), "0.6B", context_length=4096)
    assert "has never been run" in note


def test_an_unknown_chip_or_model_is_still_checked(tmp_path):
    """The page size is checked for an unknown chip and for an unknown model."""
    jax = live(V6E)
    found = warnings(jax, PoolConfig(str(tmp_path / "none"), server_args={"page_size": 1}))
    assert ["page_size=1" in entry["problem"] for entry in found] == [True, False]
    assert "the configuration cannot be read" in found[1]["problem"]
    for device in jax["devices"]:
        device |= {"kind": "TPU v9", "memory": None}
    (page,) = warned(jax, "4B", page_size=1)
    assert "page_size=1" in page


def test_a_pools_options_are_taken_without_a_profile():
    """An option that pools do not have is refused here too."""
    result = CliRunner().invoke(app, ["doctor", "--server-arg", "page_sise=1"])
    assert result.exit_code == 2
    assert "did you mean page_size" in result.output


def test_this_machine_is_reported_as_json():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    assert report["jax"]["backend"] == "cpu"
    assert report["versions"]["sglang-jax"]
    assert all(isinstance(patch["needed"], bool) for patch in report["patches"])


def test_report_for_a_person_has_the_same_findings(capsys):
    report = HEALTHY | {
        "memory": {"host_bytes": 2**34, "cores": 8},
        "environment": {"JAX_PLATFORMS": "tpu"},
        "problems": [{"problem": "process 123 holds the TPU", "remedy": "kill 123"}],
        "warnings": [{"problem": "page_size=1: too small", "remedy": "leave it out"}],
    }
    environment.show(report)
    shown = capsys.readouterr().out
    for part in ("JAX backend: tpu", "8 cores, 16.0 GiB", "min_p", "JAX_PLATFORMS=tpu", "kill 123"):
        assert part in shown
    assert "page_size=1: too small\n    → leave it out" in shown
