"""A check of `msgpack`. No patch can repair it: another package's files are in its place.

What breaks: Ray cannot read errors (`Unpacker` does not know `strict_map_key`). A call that should
end with a lost host's error ends with a `DeserializationError`.
Why: sglang-jax needs `msgpack-python`. Its last version, 0.5.6, installs a module with the name
`msgpack`, as the package `msgpack` does. The package that is installed last wins.
Remove when: sglang-jax asks for `msgpack`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys


def find_overwritten() -> tuple[str, str] | None:
    """The problem with the module, and the command that repairs it. None without a problem."""
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
