"""A server on simulated accelerators (`simulated.py`).

    SIMULATED_STEP_MS=20 python -m benchmarks.simulated_server MODULE ARGUMENTS...

runs `python -m MODULE ARGUMENTS...`: upstream's `sgl_jax.launch_server`, or `enginepool.cli`. The
model is a Qwen3, as the toy is, whose layers leave the CPU alone: what it says means nothing.
"""

from __future__ import annotations

import os
import runpy
import sys

from benchmarks import simulated

# Here, not in a function: upstream's scheduler is a process of its own, which imports the main
# module anew.
simulated.install(hollow=True).reset(float(os.environ["SIMULATED_STEP_MS"]) / 1000)


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
