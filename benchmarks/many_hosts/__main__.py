"""What pools on many hosts have to show: two Ray nodes in this machine.

    python -m benchmarks.many_hosts order       # one pool's ids, however a batch is split
    python -m benchmarks.many_hosts schedule    # simulated steps: wall time over ideal; overhead
    python -m benchmarks.many_hosts faults      # hosts that die and hang under load and updates
    python -m benchmarks.many_hosts weights     # new weights by phase, beside ray.put and ray.get
    python -m benchmarks.many_hosts processes   # a trainer in two JAX processes; needs no Ray

Exits with 1 where something that must hold did not. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

_COMMANDS = ("order", "schedule", "faults", "weights", "processes")


def main() -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_hosts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {name: importlib.import_module(f"benchmarks.many_hosts.{name}") for name in _COMMANDS}
    for name, module in modules.items():
        module.add_options(commands.add_parser(name, description=module.__doc__))
    given = parser.parse_args()
    good = modules[given.command].run(given)
    print("OK" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
