"""`enginepool doctor --first-run`: the report of this machine, and how faults appear in it."""

import getpass
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from enginepool import EnginePool, toy
from enginepool.cli.main import app
from enginepool.doctor.first_run import cache, goldens, pools, process, run
from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.run import first_run
from enginepool.doctor.first_run.scrub import scrub
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.runtime import swap_programs
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.swap_programs import SwapPrograms
from enginepool.server_args import REFUSED_ENVIRONMENT
from enginepool.toy.files import PAD_ID, read_checkpoint
from enginepool.toy.model import forward
from tests.support import faults
from tests.support.pools import NATIVE_PAGES

VARIANTS = ("page_size_1", "page_size_16", "bfloat16")
ALL = ["host", *pools.NAMES, *VARIANTS, "persistent_cache"]

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    """A pool of two devices, as the first run builds it."""
    with EnginePool(devices=2, restart=False, **pools.SERVER_ARGS) as pool:
        yield pool


def looked(check: Callable[[Checklist], None], seconds: float = 1000.0) -> Outcomes:
    """The outcomes by name, in JSON as they are sent."""
    outcomes: list[dict[str, Any]] = []
    check(Checklist(seconds, outcomes.append))
    return {outcome["check"]: outcome for outcome in json.loads(json.dumps(outcomes))}


def one(pool: EnginePool, check: Callable[[EnginePool, Finding], None]) -> dict[str, Any]:
    def run(checklist: Checklist) -> None:
        checklist.run("it", partial(check, pool))

    return looked(run)["it"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command(tmp_path: Path) -> None:
    """The whole run on two virtual devices. Every check passes and has its figures, and nothing
    in the report identifies the host."""
    file = tmp_path / "report.json"
    command = ["doctor", "--first-run", "--devices", "2", "--output", str(file)]
    done = CliRunner().invoke(app, [*command, "--budget", "800"])
    assert done.exit_code == 0, done.output
    text = file.read_text(encoding="utf-8")
    report = json.loads(text)
    assert [check["check"] for check in report["checks"]] == ALL
    assert (report["ok"], report["not_ok"], report["skipped"]) == (True, [], [])
    assert not report["interrupted"]
    seen = {check["check"]: check["seen"] for check in report["checks"]}
    assert report["platform"] == "cpu"
    assert report["versions"]["sglang-jax"]
    assert report["host"]["host_bytes"] > 0
    assert [engine["device"] for engine in seen["build"]["engines"]] == [0, 1]
    for engine in seen["build"]["engines"]:
        assert engine["build_seconds"] > 0
        assert engine["programs"] > 0
        assert engine["xla_seconds"] > 0
    assert seen["goldens_alone"]["engines"] == [
        {"engine_index": index, "right": 8, "of": 8, "compiled": 0} for index in (0, 1)
    ]
    assert seen["goldens_together"]["right"] == seen["goldens_together"]["of"] == 64
    assert min(seen["goldens_together"]["by_engine"]) > 0
    assert seen["long_output"]["largest_gap"] < 1e-3
    assert seen["wall_over_slowest"]["wall_over_slowest"] > 0
    there, back = seen["swap"]["updates"]
    assert there["checksum"] != back["checksum"] == seen["swap"]["checksum"]
    assert {"stage", "quiesce", "commit", "total"} <= there["seconds"].keys()
    assert len(there["pause_seconds"]) == 2
    assert there["bytes_per_second"] > 0
    memory = seen["kv_cycle"]["bytes_in_use"]
    released = seen["kv_cycle"]["released_bytes"]
    assert memory["before"] == memory["resumed"] == memory["released"] + released
    for size in (1, 16) if NATIVE_PAGES else (1,):
        assert seen[f"page_size_{size}"]["taken"]
        assert seen[f"page_size_{size}"]["server_args"]["page_size"] == size
    assert seen["bfloat16"]["server_args"]["dtype"] == "bfloat16"
    assert seen["persistent_cache"]["hits_by_device"] == {"0": 1, "1": 1}
    assert seen["persistent_cache"]["taken_by_devices_above_the_first"] is True
    assert seen["persistent_cache"]["written"][1]["seen"]["hits"] == 0
    assert seen["idle"]["cpu_percent_of_a_core"] < 5
    assert not re.search(r'[" (\']/\w', text)  # a path
    assert not re.search(rf"\b({re.escape(socket.gethostname())}|{getpass.getuser()})\b", text)


@pytest.mark.slow
def test_broken_engine(pool: EnginePool) -> None:
    """Checks that need all engines name the engine whose step fails. The other checks pass."""
    faults.raise_in_step(pool, 1)
    found = looked(lambda checklist: pools.check_open_pool(pool, checklist))
    assert list(found) == list(pools.NAMES[1:])
    bad = {name for name, outcome in found.items() if outcome["status"] != "ok"}
    assert bad == {"goldens_alone", "goldens_together", "wall_over_slowest", "engines"}
    assert all(found[name]["status"] == "failed" for name in bad)
    alone = found["goldens_alone"]
    assert alone["seen"]["engines"][0]["right"] == 8
    assert any("device 1 is gone" in problem for problem in alone["problems"])
    (problem,) = found["goldens_together"]["problems"]
    assert problem.startswith("engine 1 took no part: quarantined, Fault: device 1 is gone")
    assert found["goldens_together"]["seen"]["by_engine"] == [64, 0]
    assert found["engines"]["seen"]["states"] == ["serving", "quarantined"]
    (event,) = found["engines"]["seen"]["events"]
    assert (event["event"], event["engine"]) == ("engine_quarantined", 1)
    assert "faults.py" in event["exception"]
    assert str(Path(faults.__file__).parent) not in event["exception"]


@pytest.mark.slow
def test_a_swap_that_fails(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception is reported as an error with its traceback, and the other checks run."""
    faults.raise_in_commit(pool, 0)
    for name in ("goldens_together", "long_output", "wall_over_slowest", "step", "idle"):
        monkeypatch.delitem(pools.CHECKS, name)
    found = looked(lambda checklist: pools.check_open_pool(pool, checklist))
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "goldens_alone": "ok",
        "swap": "error",
        "kv_cycle": "ok",
        "engines": "ok",
    }
    assert "device 0 does not take weights" in found["swap"]["problems"][0]
    assert found["swap"]["trace"]


@pytest.mark.slow
def test_wrong_answers_are_seen(pool: EnginePool) -> None:
    """The engines subtract instead of adding."""
    pool.update_weights(toy.checkpoint("subtract"))
    alone = one(pool, goldens.alone)
    assert alone["status"] == "failed"
    assert [engine["right"] for engine in alone["seen"]["engines"]] == [0, 0]
    assert one(pool, goldens.together)["seen"]["right"] == 0
    long = one(pool, goldens.long)
    assert long["status"] == "failed"
    assert long["seen"]["largest_gap"] > 2 * goldens.LARGEST_GAP
    one_engine_differs = pool.engines[1].generate(goldens.PROMPTS, goldens.GREEDY)
    assert goldens.differing(one_engine_differs, "subtract") == []


@pytest.mark.slow
def test_device_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names it, and the other devices' engines are built."""
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    initialize = ModelRunner.initialize

    def fail_on_device_1(self: Any) -> None:
        if any(device.id == 1 for device in self.mesh.devices.flat):
            raise MemoryError("device 1 is full")
        initialize(self)

    monkeypatch.setattr(ModelRunner, "initialize", fail_on_device_1)
    monkeypatch.setattr(pools, "CHECKS", {"goldens_alone": pools.CHECKS["goldens_alone"]})
    said: list[str] = []
    found = looked(lambda checklist: pools.check_pool([1, 2], checklist, said.append))
    assert found["build"]["status"] == "error"
    assert "device 1 is full" in found["build"]["problems"][0]
    assert found["build_without_failed"]["status"] == "ok"
    (engine,) = found["build_without_failed"]["seen"]["engines"]
    assert engine["device"] == 2
    assert found["goldens_alone"]["seen"]["engines"][0]["right"] == 8
    assert found["engines"]["status"] == "ok"
    found = looked(lambda checklist: pools.check_pool([1], checklist, said.append))
    assert list(found) == list(pools.NAMES)
    assert {found[name]["status"] for name in pools.NAMES[1:]} == {"skipped"}


def test_checks_wait_for_programs_that_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache
) -> None:
    """A check counts the programs that engines compile to serve. The programs of the first update,
    which the pool compiles ahead, are compiled before checks begin."""
    waited, put, join = threading.Event(), swap_programs.put, SwapPrograms.join

    def put_late(*args: Any, **kwargs: Any) -> Any:
        assert waited.wait(60)
        return put(*args, **kwargs)

    def told(programs: SwapPrograms, timeout: float | None = None) -> bool:
        waited.set()
        return join(programs, timeout)

    monkeypatch.setattr(
        EnginePool,
        "make_runtime",
        staticmethod(lambda config, name: Runtime(config, name, one_cache)),
    )
    monkeypatch.setattr(swap_programs, "put", put_late)
    monkeypatch.setattr(SwapPrograms, "join", told)
    with pools.opened(1, Finding(), print) as pool:
        assert waited.is_set()
        assert join(pool.runtime.swap_programs, 0)


@pytest.mark.skipif(NATIVE_PAGES, reason="this upstream's native attention knows pages")
def test_page_size_that_is_refused() -> None:
    """It is no failure: the pool refuses it before anything is built."""
    options = {"page_size": 16}
    refused = looked(lambda checks: pools.check_variant(1, "it", options, checks, print))["it"]
    assert (refused["status"], refused["seen"]["taken"]) == ("ok", False)
    assert "use page_size=1" in refused["seen"]["why"]


def test_a_refusal_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a refused option counts as not accepted. Here the environment is refused."""
    name = next(iter(REFUSED_ENVIRONMENT))
    monkeypatch.setenv(name, "1")
    options = {"dtype": "bfloat16"}
    found = looked(lambda checklist: pools.check_variant(1, "it", options, checklist, print))["it"]
    assert found["status"] == "error"
    assert name in found["problems"][0]


def test_a_variant_uses_the_devices_that_were_given() -> None:
    """There is no such device here, so the engine is not built on another one."""
    check = partial(pools.check_variant, [99], "it", {"dtype": "bfloat16"})
    found = looked(lambda checklist: check(checklist, print))["it"]
    assert found["status"] == "error"
    assert "unknown id 99" in found["problems"][0]


def test_a_report_whose_file_cannot_be_written() -> None:
    """Standard output gets the report, which took minutes. The exit code is 1."""
    command = ["doctor", "--first-run", "--devices", "1", "--budget", "1"]
    done = CliRunner().invoke(app, [*command, "--output", "/dev/full"])
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["skipped"] == ["pool", *VARIANTS, "persistent_cache"]
    assert "enginepool: --output /dev/full: No space left on device; the report" in done.stderr


def test_what_raises_is_recorded() -> None:
    """With the findings so far, the text of the cause and the traceback. The next check runs."""

    def breaks(found: Finding) -> None:
        found.seen["before"] = 1
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError(f"in {Path.home()}/model.bin") from error

    def check(checklist: Checklist) -> None:
        assert not checklist.run("first", breaks)
        assert checklist.run("second", lambda found: None)

    found = looked(check)
    first = found["first"]
    assert (first["status"], first["seen"]) == ("error", {"before": 1})
    assert first["problems"][0].startswith("RuntimeError: in <path> (from JSONDecodeError: ")
    assert first["trace"][-1].startswith("decoder.py:")
    assert found["second"]["status"] == "ok"


def test_names_of_checks_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even if the environment has the same word."""
    monkeypatch.setenv("DTYPE", "bfloat16")
    folder = tmp_path / "bfloat16"
    folder.mkdir()
    (folder / "config.json").write_bytes((toy.checkpoint() / "config.json").read_bytes())
    broken = {"model": str(folder), "dtype": "float32"}
    found = looked(lambda checklist: pools.check_variant(1, "bfloat16", broken, checklist, print))
    assert found["bfloat16"]["status"] == "error"
    assert "bfloat16" not in found["bfloat16"]["problems"][0]


def test_a_check_that_does_not_fit_is_skipped() -> None:
    def check(checklist: Checklist) -> None:
        checklist.run("long", lambda found: None, needs=60.0)
        checklist.run("short", lambda found: None, needs=5.0)

    found = looked(check, seconds=20.0)
    assert found["long"]["status"] == "skipped"
    assert found["long"]["problems"] == ["needs 60 s, 20 s are left"]
    assert found["short"]["status"] == "ok"


def test_no_time_at_all() -> None:
    """Every check is listed with the reason. None has failed."""
    said: list[str] = []
    report = first_run(1, budget=1.0, say=said.append)
    assert report["skipped"] == ["pool", *VARIANTS, "persistent_cache"]
    assert all("are left" in check["problems"][0] for check in report["checks"][1:])
    assert report["ok"]
    assert any(line.startswith("pool: skipped") for line in said)


def test_a_host_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says why. The checks of devices are not lost."""

    def breaks(timeout: float) -> dict[str, Any]:
        raise PermissionError("/proc")

    monkeypatch.setattr(run, "examine", breaks)
    report = first_run(1, budget=1.0, say=print)
    assert report["checks"][0]["status"] == "error"
    assert report["checks"][0]["problems"][0].startswith("PermissionError: ")
    assert report["not_ok"] == ["host"]
    assert report["skipped"] == ["pool", *VARIANTS, "persistent_cache"]


def test_what_was_done_before_an_interruption_is_kept() -> None:
    def interrupt(text: str) -> None:
        if text.startswith("pool: skipped"):
            raise KeyboardInterrupt

    report = first_run(1, budget=1.0, say=interrupt)
    assert [check["check"] for check in report["checks"]] == ["host", "pool"]
    assert report["interrupted"]
    assert not report["ok"]


def test_a_process_that_fails() -> None:
    """It gives an outcome with the end of its output."""
    outcomes: list[dict[str, Any]] = []
    job = {"stage": "cache", "devices": [0, 99], "folder": "none", "seconds": 60.0}
    process.run_stage(job, outcomes.append, print)
    (outcome,) = outcomes
    assert (outcome["check"], outcome["status"]) == ("cache", "error")
    assert outcome["problems"] == ["its process ended with status 1"]
    assert "unknown id 99" in outcome["standard_error"][-1]
    assert str(Path(process.__file__).parents[2]) not in json.dumps(outcome)


@pytest.mark.parametrize(
    ("cut", "ending", "done", "last"),
    [
        (None, "os._exit(3)", ["one", "two"], ("pool_process", "ended with status 3")),
        (None, "os.abort()", ["one", "two"], ("pool_process", "ended by SIGABRT")),
        (-9, "os.abort()", ["one"], ("two", "ended by SIGABRT")),
    ],
)
def test_a_process_that_crashes_at_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: int | None,
    ending: str,
    done: list[str],
    last: tuple[str, str],
) -> None:
    """The outcomes before are kept, and the crash has one. An outcome that was not written to
    its end does not count."""
    lines = [
        {"plan": ["one", "two"]},
        *({"check": name, "status": "ok"} for name in ("one", "two")),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)[:cut]
    stage = f"import os\nprint({text!r}, end='', flush=True)\n{ending}\n"
    (tmp_path / "ends.py").write_text(stage)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes: list[dict[str, Any]] = []
    job = {"stage": "pool", "devices": 1, "seconds": 60.0}
    process.run_stage(job, outcomes.append, print, "ends")
    *before, crash = outcomes
    assert before == [{"check": name, "status": "ok"} for name in done]
    assert (crash["check"], crash["status"]) == (last[0], "error")
    assert crash["problems"] == [f"its process {last[1]}"]
    assert "standard_error" in crash


def test_a_process_that_takes_too_long() -> None:
    """It is ended, and its checks are listed."""
    outcomes: list[dict[str, Any]] = []
    job = {"stage": "pool", "devices": 1, "seconds": 0.1 - process.GRACE}
    process.run_stage(job, outcomes.append, print)
    assert [outcome["status"] for outcome in outcomes] == ["error"]
    assert outcomes[0]["problems"] == ["not done after 0 s"]


def test_lock_file_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that appeared during the run and that nobody holds is removed. One that existed
    before stays."""
    lock = tmp_path / "lock"
    monkeypatch.setattr(process, "LOCK_FILE", lock)
    monkeypatch.setattr(process, "device_holders", lambda: ([], 0))
    job = {"stage": "none", "devices": 1, "seconds": 60.0}
    process.run_stage(job, lambda _: lock.touch(), print)
    assert not lock.exists()
    lock.touch()
    process.run_stage(job, lambda _: None, print)
    assert lock.exists()


def outcome(device: int, hits: int, status: str = "ok") -> dict[str, Any]:
    if status != "ok":
        return {"check": f"device_{device}", "status": status, "problems": ["ended by SIGSEGV"]}
    seen = {"device": device, "hits": hits, "asked": 1}
    return {"check": f"device_{device}", "status": "ok", "seen": seen}


# The process of this stage ended after its last check.
CRASH = {"check": "cache_process", "status": "error", "problems": ["ended by SIGSEGV"]}


@pytest.mark.parametrize(
    ("read", "above", "problem"),
    [
        ([outcome(0, 1), outcome(1, 1)], True, None),
        ([outcome(0, 1), outcome(1, 0)], False, None),
        ([outcome(0, 1), outcome(1, 0, "error"), outcome(2, 0, "skipped")], False, None),
        ([outcome(0, 1)], None, None),
        ([outcome(0, 0), outcome(1, 1)], True, "did not find its own program"),
        ([outcome(0, 0, "error"), outcome(1, 0, "skipped")], False, "could not read: ended by"),
        ([outcome(0, 1), outcome(1, 1), CRASH], True, None),
        ([CRASH], None, "could not read: ended by"),
    ],
)
def test_what_the_cache_answered(
    read: list[dict[str, Any]], above: bool | None, problem: str | None
) -> None:
    """A crash on a later device is a valid answer. The first device must be served from the
    cache."""
    found = Finding()
    cache.conclude([outcome(0, 0), outcome(1, 0)], read, found)
    assert found.seen["taken_by_devices_above_the_first"] is above
    assert len(found.problems) == (problem is not None)
    assert problem is None or problem in found.problems[0]


def test_nothing_personal_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret value")
    host, user = socket.gethostname(), getpass.getuser()
    text = f'{host} {user}s: a-secret value in {Path.cwd()}/x, File "{os.__file__}", line 3'
    harmless = "and/or 524,288 // 4, https://example.org/issues/7"
    name = "<name>" if len(host) > 3 else host
    assert scrub({"text": [text, harmless], "count": 3}) == {
        "text": [
            f'{name} {user}s: <environment> in <path>, File "<path>/os.py", line 3',
            harmless,
        ],
        "count": 3,
    }


@pytest.mark.parametrize("name", ["add", "subtract"])
def test_no_arithmetic_is_an_excuse(name: str) -> None:
    """By plain JAX the right answers are by far the most probable at every token, so rounding is
    no excuse."""
    config, weights = read_checkpoint(toy.checkpoint(name))
    rows = [
        (list(prompt.encode()), answer)
        for prompt, answer in zip(goldens.PROMPTS, goldens.expected(name), strict=True)
    ]
    ids = np.full((len(rows), max(len(q) + len(a) for q, a in rows)), PAD_ID, np.int32)
    for row, (question, answer) in zip(ids, rows, strict=True):
        row[: len(question) + len(answer)] = question + answer
    logits = np.array(jax.jit(lambda ids: forward(config, weights, ids))(ids))
    for row, (question, answer) in zip(logits, rows, strict=True):
        for position, token in enumerate(answer, len(question) - 1):
            others = np.delete(row[position], token)
            assert row[position][token] - others.max() > 6


@pytest.mark.parametrize(
    "option",
    [["--model", "x"], ["--profile"], ["--tp-size", "2"], ["--server-arg", "page_size=1"]],
)
def test_options_of_other_kinds_are_refused(option: list[str]) -> None:
    """Reports must be comparable."""
    done = CliRunner().invoke(app, ["doctor", "--first-run", *option])
    assert done.exit_code == 2
    assert f"{option[0]} does not go with --first-run" in done.output


@pytest.mark.parametrize("option", [["--output", "report.json"], ["--budget", "30.5"]])
@pytest.mark.parametrize("other", [[], ["--profile"]], ids=["plain", "profile"])
def test_options_of_the_first_run_are_refused_without_it(
    option: list[str], other: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be ignored: no file would be written."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", *option, *other])
    assert done.exit_code == 2
    assert f"{' '.join(option)} goes with --first-run only" in done.output
    assert not list(tmp_path.iterdir())


def test_report_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    output = str(tmp_path / "none" / "report.json")
    done = CliRunner().invoke(app, ["doctor", "--first-run", "--output", output])
    assert done.exit_code == 2
    assert "No such file" in done.output
