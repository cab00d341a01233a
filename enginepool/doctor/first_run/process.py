"""Runs one stage in a process of its own, and reports its outcomes however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from enginepool.doctor.environment import LOCK_FILE, device_holders, lock_file
from enginepool.doctor.first_run.checklist import skipped
from enginepool.doctor.first_run.scrub import scrub

_TAIL = 40  # lines of standard error that are shown if a process failed
# Extra seconds after the limit, for a check that has begun and for giving devices back.
GRACE = 15.0

Report = Callable[[dict[str, Any]], None]


def run_stage(
    job: dict[str, Any],
    report: Report,
    say: Callable[[str], None],
    module: str = "enginepool.doctor.first_run.stages",
) -> None:
    """Run a stage for `job["seconds"]` at most, and report an outcome of every planned check.

    A process that fails after its last check has an outcome of its own, such as "pool_process".
    No process uses the compilation cache of the environment, because the time of compiling is
    measured.

    Args:
        module: Runs a stage when it is the main module, as `stages` does.
    """
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    command = [sys.executable, "-X", "faulthandler", "-m", module]
    lock_was_there = LOCK_FILE.exists()
    said: list[str] = []  # since the last outcome

    def told(outcome: dict[str, Any]) -> None:
        said.clear()
        report(outcome)

    def heard(text: str) -> None:
        said.append(text)
        say(text)

    complete = False
    try:
        with tempfile.TemporaryFile() as errors:
            ended = _run([*command, json.dumps(job)], env, errors, job, told, heard)
            complete = ended is None
            if ended is not None:
                planned, why = ended
                errors.seek(0)
                tail = errors.read().decode(errors="replace").splitlines()[-_TAIL:]
                _report_rest(planned, why, {"said": said, "standard_error": scrub(tail)}, report)
    finally:
        if not complete and not lock_was_there:
            _remove_stale_lock()


def _run(
    command: Sequence[str],
    env: dict[str, str],
    errors: IO[bytes],
    job: dict[str, Any],
    report: Report,
    say: Callable[[str], None],
) -> tuple[list[str], str] | None:
    """None if the process ended well. Otherwise the checks that were not done, or a name for the
    process itself, and the reason."""
    planned: list[str] | None = None
    limit = job["seconds"] + GRACE
    too_long = threading.Event()
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:

        def give_up() -> None:
            too_long.set()
            process.kill()

        timer = threading.Timer(limit, give_up)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.endswith("\n"):
                    continue  # it was killed while it wrote this line
                content = json.loads(line)
                if "say" in content:
                    say(content["say"])
                elif "plan" in content:
                    planned = content["plan"]
                else:
                    report(content)
                    if planned and content["check"] in planned:
                        planned.remove(content["check"])
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    name = job.get("name", job["stage"])
    if planned is None:
        planned = [name]
    elif not planned:
        if status == 0:
            return None
        planned = [f"{name}_process"]  # all checks were done
    if too_long.is_set():
        return planned, f"not done after {limit:.0f} s"
    if status < 0:
        return planned, f"its process ended by {signal.Signals(-status).name}"
    return planned, f"its process ended with status {status}"


def _report_rest(planned: Sequence[str], why: str, about: dict[str, Any], report: Report) -> None:
    """The first check that is left was running when the process ended."""
    at, *others = planned
    report({"check": at, "status": "error", "problems": [why], **about})
    for name in others:
        report(skipped(name, f"{why}, in {at}"))


def _remove_stale_lock() -> None:
    """Remove libtpu's lock file of a killed process, which would keep the next one out."""
    lock = lock_file(LOCK_FILE, *device_holders())
    if lock is not None and lock["state"] == "stale":
        LOCK_FILE.unlink(missing_ok=True)
