"""Peers that are measured turn about, each in processes of its own (`peer_process.py`)."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Contestant:
    """Processes that do a job together; stopped when they have none.

    Upstream's compile once for all of them, in `cache`: there are many.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        processes: int,
        engines: int,
        model: Path,
        server_args: dict[str, Any],
        cache: Path,
        *,
        hollow: bool = False,
        max_decode_steps: int | None = None,
        turns: int | None = None,
    ) -> None:
        """
        Args:
            kind: "pool", or "upstream" in its default, or "upstream, overlap off".
            hollow: See `simulated.install`.
            max_decode_steps, turns: Of a pool; None for its default. `turns` is how many engines
                are in the host's part of a step at once, 0 for all.
        """
        self.name = name
        env = dict(os.environ)
        if kind != "pool":
            env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
            env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        setup = {
            "kind": kind,
            "engines": engines,
            "model": str(model),
            "server_args": server_args,
            "hollow": hollow,
            "max_decode_steps": max_decode_steps,
            "turns": turns,
        }
        self._processes = []
        for _ in range(processes):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peer_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env,
            )
            self._processes.append(process)
            _write(process, setup)
            if _read(process) != "ready":
                raise SystemExit(f"{name} did not start")
            process.send_signal(signal.SIGSTOP)

    def run(self, job: dict[str, Any]) -> dict[str, float]:
        share = len(self._processes)
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        started = time.perf_counter()
        lists = [name for name in ("prompts", "params") if name in job]
        for index, process in enumerate(self._processes):
            parts = {name: job[name][index::share] for name in lists}
            _write(process, job | parts)
        answers = [json.loads(_read(process)) for process in self._processes]
        wall = time.perf_counter() - started
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        return {
            "wall_sec": wall,
            "tokens": sum(answer["tokens"] for answer in answers),
            "grown_mb": sum(answer["grown_mb"] for answer in answers),
            "tokens_per_sec": sum(answer["tokens"] for answer in answers) / wall,
            "cpu_ms_per_step": statistics.mean(a["cpu_ms_per_step"] for a in answers),
            "host_rounds_per_sec": sum(answer["host_rounds_per_sec"] for answer in answers),
            "tokens_per_simulated_second": max(a["tokens_per_simulated_second"] for a in answers),
            "busy_share": statistics.mean(answer["busy_share"] for answer in answers),
            "fallback_share": statistics.mean(answer["fallback_share"] for answer in answers),
            "thread_ms_per_step": max(answer["thread_ms_per_step"] for answer in answers),
            "steady_ms_per_step": max(answer["steady_ms_per_step"] for answer in answers),
        }

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _write(process: subprocess.Popen[str], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a contestant ended with status {process.wait()}")
    return line.strip()
