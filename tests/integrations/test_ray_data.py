"""`examples/ray_data.py` as its users run it: killed in the middle, and started again."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data")

import pyarrow.parquet

from enginepool import EnginePool
from tests.support.liveness import SECONDS, until
from tests.support.pools import SMALL
from tests.support.ray_nodes import two_nodes

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"
SAMPLED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 40, "ignore_eos": True}
ROWS = [{"id": 100 + i, "prompt": f"{i}+{i % 7}=", "kept": [i]} for i in range(96)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes(cpus=3) as where:
        yield where


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    with EnginePool(devices=1, warmup="none", **SMALL) as pool:
        results = pool.generate_all(
            [str(row["prompt"]) for row in ROWS],
            SAMPLED,
            prompt_indices=[row["id"] for row in ROWS],
        )
    return {row["id"]: result["output_ids"] for row, result in zip(ROWS, results, strict=True)}


def start(address: str, *words: Path | str) -> subprocess.Popen[bytes]:
    options = {
        "--address": address,
        "--hosts": "2",
        "--devices": "1",
        "--batch-size": "4",
        "--in-flight": "2",
        "--sampling-params": json.dumps(SAMPLED),
        "--pool-args": json.dumps(SMALL | {"warmup": "none"}),
    }
    flags = [word for pair in options.items() for word in pair]
    environment = {**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen([sys.executable, EXAMPLE, *words, *flags], env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    try:
        assert process.wait(2 * SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def jsonl(folder: Path) -> list[dict[str, Any]]:
    files = folder.glob("*.json*") if folder.exists() else []
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow  # two minutes: a job of Ray starts twice
def test_it_goes_on_where_it_was_killed(
    address: str, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    source, output = tmp_path / "prompts.jsonl", tmp_path / "results"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    killed = start(address, source, output)
    try:
        until(lambda: len(list(output.glob("*.json"))) >= 3 or killed.poll() is not None)
    finally:
        killed.kill()
        killed.wait()
    before = {row["id"] for row in jsonl(output)}
    assert 0 < len(before) < len(ROWS)
    finish(start(address, source, output))
    rows = jsonl(output)
    assert sorted(row["id"] for row in rows) == [row["id"] for row in ROWS]
    assert {row["id"]: row["output_ids"] for row in rows} == expected
    by_id = {row["id"]: row for row in ROWS}
    for row in rows:
        assert row["finish_reason"] == "length"
        assert {name: row[name] for name in ("prompt", "kept")} == {
            name: by_id[row["id"]][name] for name in ("prompt", "kept")
        }
    finish(start(address, source, output))  # nothing is left to do
    assert len(jsonl(output)) == len(ROWS)


def test_more_than_one_sample_of_a_row_is_refused() -> None:
    """Before anything is generated. The message says what to do instead."""
    command = [sys.executable, EXAMPLE, "prompts.jsonl", "results", "--sampling-params"]
    done = subprocess.run([*command, '{"n": 4}'], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert "n=4" in done.stderr
    assert "one row per sample" in done.stderr


def test_parquet(address: str, expected: dict[int, list[int]], tmp_path: Path) -> None:
    source, output = tmp_path / "prompts.parquet", tmp_path / "results"
    few = ROWS[:12]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(few), source)
    finish(start(address, source, output))
    rows = pyarrow.parquet.read_table(output).to_pylist()
    assert {row["id"]: row["output_ids"] for row in rows} == {
        row["id"]: expected[row["id"]] for row in few
    }
