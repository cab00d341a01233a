"""Compiles for TPUs in tests, with libtpu, in the environment of `make test-tpu`."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not LIBTPU, reason="make test-tpu has libtpu")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because compiling changes the process."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def check(*arguments: str, model: str = "Qwen3-0.6B") -> tuple[int, Any, str]:
    """Run the command for a small engine. Returns the exit code, the only report, and the
    output."""
    sizes = ["--layers", "1", "--batch", "8", "--prefill", "256", "--context", "1024"]
    command = ["-m", "scripts.tpu_check", "--json", "--model", model]
    done = python(*command, *sizes, *arguments)
    return done.returncode, json.loads(done.stdout or "[{}]")[0], done.stderr
