"""Starts programs of host_state_script.py, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from enginepool import toy
from tests.support.liveness import SECONDS
from tests.support.pools import SMALL

SCRIPT = Path(__file__).with_name("host_state_script.py")


class Program:
    """A program of host_state_script.py that was started."""

    def __init__(self, name: str, **options: Any) -> None:
        arguments = [name, toy.checkpoint(), json.dumps(SMALL | options)]
        self._process = subprocess.Popen(
            # -P: otherwise the folder tests/support comes before every package.
            [sys.executable, "-P", SCRIPT, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def report(self) -> tuple[dict[str, Any], str]:
        """What it found. It must print nothing else."""
        try:
            out, err = self._process.communicate(timeout=3 * SECONDS)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, err
        *printed, last = out.strip().splitlines()
        return json.loads(last), "\n".join(printed) + err
