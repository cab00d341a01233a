"""`python -m benchmarks.device`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device_busy import shares

ROOT = Path(__file__).parents[2]
CHECKS = (
    *("devices", "exact", "pool_start", "pool_decode", "pool_sampled", "pool_arrivals"),
    *("pool_swaps", "pool_memory", "pool_bfloat16", "pool_fault", "pool_kv", "pool_busy"),
    *("single_start", "single_decode", "single_sampled", "single_arrivals", "single_busy"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command(tmp_path: Path) -> None:
    """On CPU with the toy's shape every part succeeds, in its order, with its figures."""
    file = tmp_path / "device.json"
    command = [sys.executable, "-m", "benchmarks.device", "--small", "--json", str(file)]
    done = subprocess.run(
        [*command, "--parts", "exact", "pool", "single"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["ok"]
    assert tuple(check["check"] for check in report["checks"]) == CHECKS
    seen = {check["check"]: check["seen"] for check in report["checks"]}
    assert (seen["exact"]["wrong"], seen["exact"]["tokens"]) == (0, 48)
    assert seen["exact"]["largest_error"] < 1e-4
    assert 0 < seen["pool_bfloat16"]["mean_error"] < seen["pool_bfloat16"]["largest_error"] < 0.5
    assert list(seen["pool_swaps"]["sources"]) == ["on the device", "NumPy", "files"]
    assert seen["pool_fault"]["by"] == "reset"
    assert 0 < seen["pool_kv"]["gb"] < seen["pool_memory"]["gb"]
    for who in ("pool", "single"):
        assert seen[f"{who}_start"]["seconds"] > 0
        assert seen[f"{who}_decode"]["tokens"] == 4 * 16
    assert "decode, tokens/s" in done.stdout


def trace(*spans: tuple[float, float]) -> list[dict]:
    """A GPU's trace in Chrome's format. One of its lanes is no stream."""
    names = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 5, "name": "thread_name", "args": {"name": "Stream #13"}},
        {"ph": "M", "pid": 1, "tid": 6, "name": "thread_name", "args": {"name": "Steps"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 1, "tid": 6, "ts": 0, "dur": 10000},
        {"ph": "X", "pid": 2, "tid": 5, "ts": 0, "dur": 10000},
    ]
    runs = [{"ph": "X", "pid": 1, "tid": 5, "ts": a, "dur": b - a} for a, b in spans]
    return names + runs


def test_busy_share() -> None:
    """Overlapping spans count once."""
    found = shares(trace((1000, 2000), (1500, 1800), (1900, 2500), (2600, 3000)))
    assert found["percent"] == pytest.approx(95.0)
    assert found["window_ms"] == 2.0


def test_no_device_in_a_trace() -> None:
    """A trace without a device, as on CPU, gives no figure."""
    assert shares({"traceEvents": trace()[3:]}) == {}
