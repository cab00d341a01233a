"""A look at `msgpack`, which no patch can repair: it is another package's files on disk.

What breaks: Ray cannot read errors (`Unpacker` does not know `strict_map_key`): what a lost host
raises ends a call with a `DeserializationError`.
Why: sglang-jax asks for `msgpack-python`, whose last version, 0.5.6, has the module of `msgpack`.
Which of the two is there depends on the order of an installer.
Remove when: sglang-jax asks for `msgpack`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys


def find_overwritten() -> tuple[str, str] | None:
    """What is wrong with the module, and the command that repairs it; None if nothing is."""
    try:
        msgpack = importlib.import_module("msgpack")
    except ModuleNotFoundError:
        return None
    try:
        msgpack.unpackb(msgpack.packb({1: 2}), strict_map_key=False)
    except TypeError:
        version = ".".join(map(str, msgpack.version))
        problem = (
            f"the module msgpack is {version}: msgpack-python, which sglang-jax brings, was "
            "written over it, and Ray cannot read errors with it"
        )
        return problem, _repair()
    return None


def _repair() -> str:
    installer = f"{sys.executable} -m pip install --force-reinstall"
    if importlib.util.find_spec("pip") is None:
        installer = f"uv pip install --python {sys.executable} --reinstall"
    return f"{installer} --no-deps 'msgpack>=1'"
