"""`enginepool serve` beside upstream's own server: requests a second and latencies.

    python -m benchmarks.serving --step-ms 20 --running 16 --concurrency 64 --requests 256

Each server runs alone, with the same options, on this machine. Upstream's has one device, and
overlap scheduling on, as its users run it. The client is upstream's `bench_serving`. It sends the
same prompts to /v1/completions and reads streams. Both servers have simulated accelerators
(`simulated.py`): a step takes so long and leaves the cores alone, as on a TPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.command import CORES, arguments, medians, plain, write_json
from enginepool import toy
from enginepool.config import CPU_DEFAULTS

_MODEL, _NEW_TOKENS = str(toy.checkpoint()), "16"
_START_SECONDS = 300.0
_UPSTREAM = ("--device", "cpu", "--grammar-backend", "none")  # as a pool's engines have
_FIGURES = {
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "TTFT ms, median": "median_ttft_ms",
    "TTFT ms, p99": "p99_ttft_ms",
    "end-to-end ms, median": "median_e2e_latency_ms",
    "end-to-end ms, p99": "p99_e2e_latency_ms",
}


def main() -> None:
    parser = arguments("serving", __doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, help="requests of an engine at a time")
    parser.add_argument(
        "--step-ms", type=float, default=20, help="of the accelerators; default: 20"
    )
    options = parser.parse_args()

    os.environ["SIMULATED_STEP_MS"] = str(options.step_ms)
    simulated = [sys.executable, "-m", "benchmarks.simulated_server"]
    upstream, pool = [*simulated, "sgl_jax.launch_server"], [*simulated, "enginepool.cli", "serve"]
    same = [*flags(), "--model-path", _MODEL]
    if options.running is not None:
        same += ["--max-running-requests", str(options.running)]
    servers = {"upstream's server, 1 device": [*upstream, *_UPSTREAM, *same]}
    for devices in options.devices:
        command = [*pool, "--devices", str(devices), *same]
        servers[f"enginepool serve, {devices} device{'s' * (devices > 1)}"] = command
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory, "prompts.jsonl")
        _write_prompts(prompts, options.requests)
        for name, command in servers.items():
            with server(command) as url:
                _measure(url, prompts, options)  # warms up what compiles late
                rounds = [_measure(url, prompts, options) for _ in range(options.rounds)]
            rows[name] = medians(
                [{figure: one[key] for figure, key in _FIGURES.items()} for one in rounds]
            )
    steps = f"steps of {options.step_ms:g} ms"
    print(f"{options.requests} requests, {options.concurrency} at a time, {steps}, {CORES} cores")
    plain(
        ("", *_FIGURES),
        ([name, *(f"{value:.1f}" for value in row.values())] for name, row in rows.items()),
    )
    write_json(options, rows=rows)


def flags() -> list[str]:
    """What a pool chooses by itself on CPU, for upstream's server."""
    flags = []
    for name, value in CPU_DEFAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        else:
            values = value if isinstance(value, list) else [value]
            flags += [flag, *map(str, values)]
    return flags


def _write_prompts(path: Path, count: int) -> None:
    """Conversations in the form of bench_serving. All prompts differ."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            prompt = f"{i:04d}: {i % 90 + 10}+{(7 * i) % 90 + 10}="
            turns = [{"content": prompt}, {"content": "an answer"}]
            print(json.dumps({"conversations": turns}), file=file)


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[str]:
    """A server on a free port of the loopback address, while the block lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=log,
        )
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read().decode(errors='replace')[-2000:]}")


def _measure(url: str, prompts: Path, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "result.jsonl")
        command = [
            *(sys.executable, "-m", "sgl_jax.bench_serving", "--backend", "sglang-oai"),
            *("--base-url", url, "--model", _MODEL, "--tokenizer", _MODEL),
            *("--dataset-name", "custom", "--dataset-path", str(prompts)),
            *("--sharegpt-output-len", _NEW_TOKENS),
            *("--num-prompts", str(options.requests)),
            *("--max-concurrency", str(options.concurrency)),
            *("--output-file", str(out), "--disable-tqdm"),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"bench_serving failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        result = json.loads(out.read_text().splitlines()[-1])
    if result["completed"] != options.requests:
        raise RuntimeError(f"{result['completed']} of {options.requests} requests were answered")
    return result


if __name__ == "__main__":
    main()
