"""A server on simulated accelerators (`simulated.py`).

    SIMULATED_STEP_MS=20 python -m benchmarks.simulated_server MODULE ARGUMENTS...

runs `python -m MODULE ARGUMENTS...`: upstream's `sgl_jax.launch_server`, or `enginepool.cli`. The
model must be a Qwen3, as the toy is. Its layers leave the CPU alone, so its output means nothing.
"""

from __future__ import annotations

import os
import runpy
import sys

from benchmarks import simulated

# Not in a function: upstream's scheduler is another process, which imports the main module again.
simulated.install().reset(float(os.environ["SIMULATED_STEP_MS"]) / 1000)


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
