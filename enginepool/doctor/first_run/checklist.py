"""Runs one check after the other within a time limit, and reports each outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginepool.doctor.first_run.scrub import scrub

_LONGEST = 2000  # characters of an error; XLA can write pages
_FRAMES = 10


@dataclass
class Finding:
    """The findings of a check so far. They stay if the check raises.

    Attributes:
        seen: Figures for the reader of the report.
        problems: The problems found. Empty means "ok".
    """

    seen: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.problems.append(otherwise)


class Checklist:
    """Runs checks and reports an outcome for each: `check`, `status` ("ok", "failed", "error" for
    one that raised, "skipped"), `seconds`, `seen`, and `problems` unless it is ok.

    Args:
        seconds: The seconds after which no check begins.
        report: A function that is called with every outcome.
    """

    def __init__(self, seconds: float, report: Callable[[dict[str, Any]], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._report = report

    @property
    def left(self) -> float:
        return self._deadline - time.monotonic()

    def skip(self, name: str, why: str) -> None:
        self._report(skipped(name, why))

    def run(self, name: str, check: Callable[[Finding], None], needs: float = 0.0) -> bool:
        """Run a check if there is time. Returns whether it was ok.

        Args:
            needs: The seconds that must be left.
        """
        if self.left < needs:
            self.skip(name, f"needs {needs:.0f} s, {max(0.0, self.left):.0f} s are left")
            return False
        found, started = Finding(), time.monotonic()
        status, trace = "ok", None
        try:
            check(found)
        except Exception as error:  # whatever it is, the other checks go on
            status, trace = "error", frames(error)
            found.problems.append(describe(error))
        if status == "ok" and found.problems:
            status = "failed"
        outcome = {
            "check": name,
            "status": status,
            "seconds": round(time.monotonic() - started, 3),
            "seen": scrub(found.seen),
        }
        if found.problems:
            outcome["problems"] = scrub(found.problems)
        if trace:
            outcome["trace"] = trace
        self._report(outcome)
        return status == "ok"


def skipped(name: str, why: str) -> dict[str, Any]:
    """The outcome of a check that was not begun."""
    return {"check": name, "status": "skipped", "problems": [why]}


def describe(error: BaseException) -> str:
    """The error, with what caused it."""
    text = f"{type(error).__name__}: {error}"
    cause = _root(error)
    if cause is not error and str(cause) not in text:
        text += f" (from {type(cause).__name__}: {cause})"
    return scrub(text)[:_LONGEST]


def frames(error: BaseException) -> list[str]:
    """The innermost calls that led to it: file, line, function."""
    calls = traceback.extract_tb(_root(error).__traceback__)[-_FRAMES:]
    return [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls]


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
