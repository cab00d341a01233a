"""The process of one stage: `python -m enginepool.doctor.first_run.stages JOB`.

JOB is a JSON object with the stage and its arguments. Each line on standard output is a JSON object
too: the names of the checks to come (`plan`), progress (`say`), or an outcome.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginepool.doctor.first_run.checklist import Checklist

Line = Callable[[dict[str, Any]], None]


def main(job: dict[str, Any], line: Line) -> None:
    def say(text: str) -> None:
        line({"say": text})

    checklist = Checklist(job["seconds"], line)
    if job["stage"] == "cache":
        from enginepool.devices import resolve_devices
        from enginepool.doctor.first_run.cache import check_devices

        groups = resolve_devices(job["devices"], 1)
        line({"plan": [f"device_{group[0].id}" for group in groups]})
        check_devices(job["devices"], checklist, Path(job["folder"]))
        return
    from enginepool.doctor.first_run import pools

    if job["stage"] == "pool":
        line({"plan": list(pools.NAMES)})
        pools.check_pool(job["devices"], checklist, say)
    else:
        line({"plan": [job["name"]]})
        pools.check_variant(job["devices"], job["name"], job["options"], checklist, say)


def standard_output() -> Line:
    """Keep standard output for these lines: all other output goes to standard error."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def line(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=lines, flush=True)

    return line


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), standard_output())
