"""The first run: all stages one after the other, and the report to send in."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from enginepool.devices import DeviceSpec
from enginepool.doctor.environment import examine
from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.process import GRACE, run_stage
from enginepool.doctor.first_run.scrub import scrub
from enginepool.sizing import rules

BUDGET = 600.0
# The seconds that a stage needs: it imports upstream, starts the platform and builds an engine.
_POOL_SECONDS, _ENGINE_SECONDS, _CACHE_SECONDS = 45.0, 45.0, 30.0
_PAGE_SIZES = {"tpu": (rules.PAGE_SIZE, 32, rules.LEAST_PAGE_SIZE)}
_OTHER_PAGE_SIZES = (1, rules.LEAST_PAGE_SIZE)
# The usual dtype of weights and KV. The toy's own is float32, which all other checks use.
_SHORTER = "bfloat16"
_CACHE_CHECK = "persistent_cache"

Say = Callable[[str], None]


def first_run(
    devices: DeviceSpec = None, *, budget: float = BUDGET, start: float = 60.0, say: Say = print
) -> dict[str, Any]:
    """Check with the toy everything that was never run on a TPU.

    Args:
        devices: A count or ids, as for EnginePool.
        budget: Seconds for all checks. Checks that do not fit are skipped.
        start: Seconds that JAX may take to start.
        say: Gets lines about the progress.

    Returns:
        The report to send in. It does not identify the host.
    """
    return _Run(devices, budget, say).run(start)


class _Run:
    def __init__(self, devices: DeviceSpec, budget: float, say: Say) -> None:
        self._devices = devices
        self._say = say
        self._started = time.monotonic()
        self._checks: list[dict[str, Any]] = []
        self._checklist = Checklist(budget, self._add)
        self._report: dict[str, Any] = {"first_run": 1, "budget_seconds": budget}

    def run(self, start: float) -> dict[str, Any]:
        self._checklist.run("host", partial(self._look_at_host, start))
        interrupted = False
        try:
            if self._report.get("devices") != []:  # not known if the check of the host raised
                self._look_at_devices()
        except KeyboardInterrupt:  # keeps results that took minutes
            interrupted = True
        bad = [check["check"] for check in self._checks if check["status"] in ("failed", "error")]
        return {
            **self._report,
            "seconds": round(time.monotonic() - self._started, 1),
            "interrupted": interrupted,
            "ok": not bad and not interrupted,
            "not_ok": bad,
            "skipped": [c["check"] for c in self._checks if c["status"] == "skipped"],
            "checks": self._checks,
        }

    def _look_at_devices(self) -> None:
        self._stage("pool", _POOL_SECONDS)
        for name, options in _variants(self._report.get("platform", "")).items():
            self._stage("variant", self._engine_seconds(), name=name, options=options)
        self._look_at_cache()

    def _add(self, outcome: dict[str, Any]) -> None:
        self._checks.append(outcome)
        seconds = f" in {outcome['seconds']:.1f} s" if "seconds" in outcome else ""
        self._say(f"{outcome['check']}: {outcome['status']}{seconds}")
        for problem in outcome.get("problems", ()):
            self._say(f"  {problem}")

    def _look_at_host(self, start: float, found: Finding) -> None:
        self._say("looking at the host")
        host = examine(start)
        jax = host["jax"]
        self._report |= {
            "versions": host["versions"],
            "system": {"name": platform.system(), "machine": platform.machine()},
            "host": host["memory"],
            "platform": jax.get("backend"),
            "devices": jax.get("devices", []),
            "patches": scrub(host["patches"]),
        }
        # The report has only their number, because these lines have commands and process ids.
        for entry in host["problems"]:
            self._say(f"  {entry['problem']}\n    → {entry['remedy']}")
        found.seen["problems"] = len(host["problems"])
        found.expect("error" not in jax, scrub(jax.get("error", "")))
        found.expect(not host["problems"], "`enginepool doctor` names the problems")

    def _stage(self, stage: str, needs: float, **job: Any) -> None:
        """Run a stage in a process of its own, or report that there is no time for it."""
        name, left = job.get("name", stage), self._checklist.left - GRACE
        if left < needs:
            self._checklist.skip(name, f"needs {needs:.0f} s, {left:.0f} s are left")
            return
        self._say(f"{name}:")
        job |= {"stage": stage, "devices": self._devices, "seconds": left}
        run_stage(job, self._add, self._say)

    def _engine_seconds(self) -> float:
        """The seconds that a stage with one engine needs, by the slowest engine so far."""
        built = [
            engine["build_seconds"] + engine["warmup_seconds"]
            for check in self._checks
            for engine in check.get("seen", {}).get("engines", ())
            if "build_seconds" in engine
        ]
        return _ENGINE_SECONDS + max(built, default=0.0)

    def _look_at_cache(self) -> None:
        """Check the cache. It runs last, because this check may crash libtpu."""
        from enginepool.doctor.first_run.cache import conclude

        with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
            written: list[dict[str, Any]] = []
            read: list[dict[str, Any]] = []

            def look(found: Finding) -> None:
                for outcomes in (written, read):
                    job = {"stage": "cache", "devices": self._devices, "folder": folder}
                    job["seconds"] = max(1.0, self._checklist.left - GRACE)
                    run_stage(job, outcomes.append, self._say)
                conclude(written, read, found)

            self._say(f"{_CACHE_CHECK}:")
            self._checklist.run(_CACHE_CHECK, look, _CACHE_SECONDS + GRACE)


def _variants(platform_name: str) -> dict[str, dict[str, Any]]:
    """For each check that builds an engine of its own: the options of that engine."""
    sizes = _PAGE_SIZES.get(platform_name, _OTHER_PAGE_SIZES)
    pages = {f"page_size_{size}": {"page_size": size} for size in sizes}
    return {**pages, _SHORTER: {"dtype": _SHORTER}}
