"""Makes the report of `enginepool doctor`: devices and who holds them, versions, patches,
environment.

JAX is started in a process of its own, with a time limit. It may hang forever while another process
holds the TPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from enginepool.config import PoolConfig
from enginepool.doctor.tpu_warnings import warnings
from enginepool.process.cores import usable_cores
from enginepool.server_args import REFUSED_ENVIRONMENT

LOCK_FILE = Path("/tmp/libtpu_lockfile")
# TPU chips by driver generation: one device file per chip, or one per VFIO group.
_DEVICE_FILES = ("/dev/accel", "/dev/vfio/")
_PACKAGES = ("enginepool", "sglang-jax", "jax", "jaxlib", "libtpu", "flax", "transformers")
_ENVIRONMENT = (
    "ALLOW_MULTIPLE_LIBTPU_LOAD",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PLATFORMS",
    "LIBTPU_INIT_ARGS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    *REFUSED_ENVIRONMENT,
)
_START_JAX = """
import json, jax
print(json.dumps({
    "backend": jax.default_backend(),
    "processes": jax.process_count(),
    "devices": [
        {"id": d.id, "platform": d.platform, "kind": d.device_kind, "memory": d.memory_stats()}
        for d in jax.local_devices()
    ],
}))
"""


def examine(timeout: float = 60.0, config: PoolConfig | None = None) -> dict[str, Any]:
    """Make the report. Problems of the host are part of it and never raised.

    Args:
        timeout: Seconds that JAX may take to start.
        config: The configuration of the pool that is to run here, if it is known.

    Returns:
        The findings. `problems` keep a pool from running. `warnings` are about its settings on a
        TPU and about other defects. Both are lists of `{"problem", "remedy"}`.

    Raises:
        InvalidConfig: On a TPU, an option has a value that no size can be computed with.
    """
    # This comes first, because the process that starts JAX holds the TPU itself.
    holders, hidden = device_holders()
    lock = lock_file(LOCK_FILE, holders, hidden)
    report: dict[str, Any] = {
        "versions": versions(),
        "jax": start_jax([sys.executable, "-c", _START_JAX], timeout),
        "memory": {"host_bytes": psutil.virtual_memory().total, "cores": usable_cores()},
        "tpu": {"holders": holders, "processes_not_readable": hidden, "lock_file": lock},
        "patches": needed_patches(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
    report["problems"] = problems(report)
    report["warnings"] = warnings(report["jax"], config) + modules()
    return report


def versions() -> dict[str, str | None]:
    """Installed versions. None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def start_jax(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """Backend and devices as `command` prints them, or `error` with the reason."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not start within {timeout:g} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"JAX ended with status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def device_holders(proc: Path = Path("/proc")) -> tuple[list[dict[str, Any]], int]:
    """Processes that have a TPU's device file or libtpu's lock file open.

    Returns:
        A `{"pid", "command", "files"}` of each process, and the number of processes of other users
        that cannot be examined. Empty without a /proc.
    """
    found, hidden = [], 0
    for folder in proc.glob("[0-9]*"):
        try:
            links = _open_files(folder)
            said = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # the process has ended
            continue
        files = sorted({link for link in links if _is_tpu(link)})
        if files:
            command = said.decode(errors="replace").strip()
            found.append({"pid": int(folder.name), "command": command, "files": files})
    return sorted(found, key=lambda holder: holder["pid"]), hidden


def _open_files(process: Path) -> list[str]:
    links = []
    for entry in os.scandir(process / "fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile, and others stay open
            links.append(os.readlink(entry.path))
    return links


def _is_tpu(link: str) -> bool:
    return link.startswith(_DEVICE_FILES) or link == str(LOCK_FILE)


def lock_file(path: Path, holders: Sequence[dict[str, Any]], hidden: int) -> dict[str, Any] | None:
    """State of libtpu's lock file: "held", "stale", or "unknown"; None when there is none.

    A killed process leaves the file behind, and libtpu then says that the TPU is in use.
    """
    if not path.exists():
        return None
    state = "held" if holders else "unknown" if hidden else "stale"
    return {"path": str(path), "state": state}


def needed_patches() -> list[dict[str, Any]]:
    """For each patch: whether the installed upstream needs it, or why that is not known."""
    import patches

    answers = []
    for patch in patches.ALL:
        answer: dict[str, Any] = {"name": patch.name, "issue": patch.issue}
        try:
            answer["needed"] = patch.is_needed()
        except Exception as error:  # upstream may be missing or unknown
            answer |= {"needed": None, "error": f"{type(error).__name__}: {error}"}
        answers.append(answer)
    return answers


def modules() -> list[dict[str, str]]:
    """Problems of modules that only some uses of a pool need."""
    from patches.overwritten_msgpack import find_overwritten

    found = find_overwritten()
    return [] if found is None else [{"problem": found[0], "remedy": found[1]}]


def problems(report: dict[str, Any]) -> list[dict[str, str]]:
    """The problems that keep a pool from running, each with its remedy."""
    found = []
    jax, holders, lock = report["jax"], report["tpu"]["holders"], report["tpu"]["lock_file"]
    for holder in holders:
        problem = f"process {holder['pid']} holds the TPU ({holder['command'][:80]})"
        found.append((problem, f"wait for it, or end it: kill {holder['pid']}"))
    if lock is not None and lock["state"] != "held":
        sure = "nothing holds" if lock["state"] == "stale" else "no process of yours holds"
        found.append((f"{lock['path']} exists and {sure} the TPU", f"rm -f {lock['path']}"))
    if "error" in jax:
        remedy = "run `python -c 'import jax; jax.devices()'` to see more"
        if holders or lock is not None:
            remedy = "free the TPU as said above"
        elif "did not start" in jax["error"]:
            remedy = "look for a process of another user that holds the TPU; or give more --timeout"
        found.append((jax["error"], remedy))
    elif jax["processes"] != 1:
        remedy = "run on a single-host slice, or start the same program on every host"
        found.append((f"JAX spans {jax['processes']} processes", remedy))
    if report["versions"]["sglang-jax"] is None:
        found.append(("sglang-jax is not installed", "pip install 'enginepool[tpu]'"))
    for name, why in REFUSED_ENVIRONMENT.items():
        if report["environment"].get(name, "0") not in ("", "0"):
            found.append((f"{name} is set: {why}", f"unset {name}"))
    for patch in report["patches"]:
        if patch["needed"] is None:
            problem = f"patch {patch['name']} does not know this sglang-jax: {patch['error']}"
            found.append((problem, "install a version that enginepool was tested with"))
    return [{"problem": problem, "remedy": remedy} for problem, remedy in found]


def show(report: dict[str, Any]) -> None:
    """Print a report for a person."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print("Versions", style="bold")
    for name, version in report["versions"].items():
        console.print(f"  {name:14}{version or 'not installed'}")
    jax, tpu = report["jax"], report["tpu"]
    console.print("Devices", style="bold")
    console.print(f"  JAX backend: {jax.get('backend', 'none')}")
    for device in jax.get("devices", ()):
        memory = device["memory"] or {}
        limit = memory.get("bytes_limit")
        size = f", {limit / 2**30:.1f} GiB" if limit else ""
        console.print(f"  {device['platform']} {device['id']}: {device['kind']}{size}")
    host = report["memory"]
    console.print(f"  host: {host['cores']} cores, {host['host_bytes'] / 2**30:.1f} GiB")
    lock = tpu["lock_file"]
    console.print(f"  libtpu lock file: {lock['state'] if lock else 'none'}")
    console.print("Patches", style="bold")
    for patch in report["patches"]:
        answer = {True: "applied by a pool", False: "not needed", None: "unknown"}[patch["needed"]]
        console.print(f"  {patch['name']:26}{answer}")
    console.print("Environment", style="bold")
    for name, value in report["environment"].items():
        console.print(f"  {name}={value}")
    for title, found in (("Warnings", report["warnings"]), ("Problems", report["problems"])):
        if found:
            console.print(title, style="bold")
        for entry in found:
            console.print(f"  {entry['problem']}\n    → {entry['remedy']}")
    if not report["problems"]:
        console.print("No problems found", style="bold")
