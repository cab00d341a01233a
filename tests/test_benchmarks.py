"""The benchmark runs, and prints and writes what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.table import CORES, limited_by_cores

ROOT = Path(__file__).parents[1]


def test_concurrency_benchmark_prints_its_lines_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.concurrency", "--json", file),
            *("--num-engines", "2", "--concurrency", "2", "--warmup-sequential"),
            *("--repeats", "1", "--max-new-tokens", "8", "--step-ms", "2"),
            *("--max-running-requests", "2", "--max-total-tokens", "256"),
            *("--context-length", "64", "--max-prefill-tokens", "64"),
            *("--server-arg", "chunked_prefill_size=64"),
            *("--server-arg", "precompile_token_paddings=[64]"),
            *("--server-arg", "precompile_bs_paddings=[2]"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^JAX: \{'jax': .*'cpu'", done.stdout, re.MULTILINE)
    assert re.search(r"^\[engine 0\] generate_sec=\d+\.\d+ text='", done.stdout, re.MULTILINE)
    assert re.search(r"^\[engine 1\] generate_sec=\d+\.\d+ text='", done.stdout, re.MULTILINE)
    assert re.search(r"^DONE: engines=2 wall_sec=\d+\.\d+$", done.stdout, re.MULTILINE)

    pool, one, upstream = json.loads(file.read_text())["rows"]
    for row in (pool, one, upstream):
        assert row["runs"][0]["tokens"] == 2 * 2 * 8
        assert row["wall_over_slowest"] >= 1.0
        # A step advances the two requests of a batch at most; less would mean skipped sleeps.
        for advanced in row["runs"][0]["tokens_per_simulated_second"]:
            assert 0 < advanced <= 2 / 0.002
    assert len(pool["runs"][0]["generate_sec"]) == 2
    assert len(one["runs"][0]["generate_sec"]) == 1


@pytest.mark.parametrize(("engines", "limited"), [(1, False), (100, True)])
def test_a_point_with_too_few_cores_is_marked(engines, limited):
    step_ms = 10.0
    cpu_ms = 0.01 * CORES * step_ms
    assert limited_by_cores(engines, cpu_ms, step_ms) is limited
