"""examples/first_run_tpu.ipynb, which users run on a TPU, runs from top to bottom on CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.xla import virtual_devices

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_run_tpu.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every cell except the one that installs, in order. The report to send in is printed last,
    as JSON, with the results of both commands."""
    settings = {
        "REPOSITORY": ROOT,
        "RESULTS": tmp_path,
        "DEVICES": 1,
        "SMALL": 1,
        "BUDGET": 20,  # the host only; longer stages are skipped
        "PARTS": "exact",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"ENGINEPOOL_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", virtual_devices(1))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["first_run"]["checks"][0]["check"] == "host"
    assert report["first_run"]["platform"] == "cpu"
    checks = {check["check"]: check["status"] for check in report["device"]["checks"]}
    assert checks == {"devices": "ok", "exact": "ok"}


def test_notebook_is_clean() -> None:
    """It is stored without outputs, and one cell installs."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum("install" in cell["metadata"].get("tags", []) for cell in code) == 1
