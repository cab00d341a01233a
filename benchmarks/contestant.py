"""Pools and upstream's engines that take turns, each in processes of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Of the standard error of a process that ended.
_LAST_LINES = 20


class Contestant:
    """Processes (`peer_process.py`) that do a job together. They are stopped while they have none.

    Processes with upstream's engines share a compilation cache: there are many of them.
    """

    def __init__(self, name: str, model: Path, server_args: dict[str, Any], engines: int) -> None:
        """
        Args:
            name: "pool", or "processes": upstream in its default.
            engines: How many engines a pool has, or how many processes upstream has.
        """
        self.name = name
        env, processes = dict(os.environ), 1
        if name != "pool":
            processes, engines = engines, 1
            env["JAX_COMPILATION_CACHE_DIR"] = str(model.with_name("compiled"))
            env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        setup = {"name": name, "engines": engines, "model": str(model), "server_args": server_args}
        self._processes: list[_Process] = []
        for index in range(processes):
            process = _Process(name, model.with_name(f"{name}-{index}.stderr"), env)
            self._processes.append(process)
            process.write(setup)
            if process.read() != "ready":
                raise SystemExit(f"{name} did not start")
            process.send_signal(signal.SIGSTOP)

    def run(self, job: dict[str, Any]) -> dict[str, float]:
        """Divide the prompts among the processes; figures of all of them."""
        share = len(self._processes)
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        started = time.perf_counter()
        lists = [name for name in ("prompts", "params") if name in job]
        for index, process in enumerate(self._processes):
            parts = {name: job[name][index::share] for name in lists}
            process.write(job | parts)
        answers = [json.loads(process.read()) for process in self._processes]
        wall = time.perf_counter() - started
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        tokens = sum(answer["tokens"] for answer in answers)
        means = ("cpu_ms_per_step", "busy_share", "fallback_share")
        return {
            "wall_sec": wall,
            "tokens": tokens,
            "tokens_per_sec": tokens / wall,
            **{key: statistics.mean(answer[key] for answer in answers) for key in means},
        }

    def close(self) -> None:
        for process in self._processes:
            process.close()


def random_job(
    count: int, prompt: tuple[int, int], output: tuple[int, int], step_ms: float, seed: int
) -> dict[str, Any]:
    """Greedy requests with random prompts. `prompt` and `output` are ranges of tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(*prompt))] for _ in range(count)]
    params = [
        {"temperature": 0.0, "max_new_tokens": rng.randint(*output), "ignore_eos": True}
        for _ in range(count)
    ]
    return {"step_ms": step_ms, "prompts": prompts, "params": params}


class _Process:
    """One process (`peer_process.py`): lines of JSON in and out."""

    def __init__(self, contestant: str, stderr: Path, env: dict[str, str]) -> None:
        self._contestant, self._stderr = contestant, stderr
        with stderr.open("wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peer_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=env,
            )
        self.send_signal = self._popen.send_signal

    def write(self, value: Any) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(value) + "\n")
        self._popen.stdin.flush()

    def read(self) -> str:
        """
        Raises:
            SystemExit: The process ended. The message has the last lines of its standard error.
        """
        assert self._popen.stdout is not None
        if line := self._popen.stdout.readline():
            return line.strip()
        status = self._popen.wait()
        lines = self._stderr.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(lines[-_LAST_LINES:])
        raise SystemExit(f"{self._contestant}: a process ended with status {status}:\n{last}")

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()
