"""Setting up a fresh clone: the constraints files, and the search for a Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "upstream"),
    [("constraints.txt", "0.1.0rc0"), ("constraints-0.0.3rc99.txt", "0.0.3rc99")],
)
def test_constraints_are_names_and_exact_versions(file, upstream):
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert f"sglang-jax=={upstream}" in lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line), line
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)
    assert not [
        name for name in names if "cuda" in name or "nvidia" in name or name == "enginepool"
    ]


def find_python(**environment):
    return subprocess.run(
        ["/bin/sh", "scripts/find-python"],
        cwd=ROOT,
        env={"HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
    )


def test_python_is_found_in_pyenv_when_the_path_has_none(tmp_path):
    installed = tmp_path / "versions" / "{}.{}.99".format(*sys.version_info) / "bin"
    installed.mkdir(parents=True)
    (installed / "python").symlink_to(sys.executable)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("ls", "sort"):
        (tools / tool).symlink_to(shutil.which(tool))
    done = find_python(PATH=str(tools), PYENV_ROOT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/")


def test_missing_python_is_explained():
    done = find_python(PATH=os.defpath, PYTHON="/nonexistent/python")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "No suitable Python: enginepool needs 3.12 or 3.13" in done.stderr
    assert "make demo PYTHON=" in done.stderr
