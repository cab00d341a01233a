"""Setting up a fresh clone: the constraints files, and the search for a Python."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "upstream"),
    [
        ("constraints.txt", "0.1.0rc0"),
        ("constraints-0.0.3rc99.txt", "0.0.3rc99"),
        ("constraints-clients.txt", None),
        ("constraints-docs.txt", None),
        ("constraints-next.txt", None),
    ],
)
def test_constraints_are_names_and_exact_versions(file, upstream):
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert upstream is None or f"sglang-jax=={upstream}" in lines
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


@pytest.mark.slow
def test_the_wheel_has_the_toy_and_not_its_training(tmp_path):
    """A wheel of this tree has the package, the patches and two checkpoints, but not the code
    that made these."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("enginepool", "patches", "scripts", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=True
    )
    wheel = zipfile.ZipFile(tree / done.stdout.splitlines()[-1])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in files} == {"enginepool", "patches"}
    toy = {name.removeprefix("enginepool/toy/") for name in files if "/toy/" in name}
    assert {name for name in toy if name.endswith(".py")} == {"__init__.py", "files.py", "model.py"}
    for checkpoint in ("add", "subtract"):
        shipped = {path.name for path in (ROOT / "enginepool/toy" / checkpoint).iterdir()}
        assert {n.partition("/")[2] for n in toy if n.startswith(f"{checkpoint}/")} == shipped
    assert {f"enginepool/serve/{page}.html" for page in ("page", "docs")} <= files
    assert "enginepool/py.typed" in files
    models = (ROOT / "enginepool/doctor/models").iterdir()
    assert {f"enginepool/doctor/models/{path.name}" for path in models} <= files


def test_make_passes_options_on_to_the_demo():
    """The target's command refuses a bad option before it builds an engine."""
    asked = ["make", "--dry-run", "demo", "ARGS=--engines 0"]
    printed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = printed.splitlines()[-1].replace(".venv/bin/python", sys.executable)
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--engines" in done.stderr
