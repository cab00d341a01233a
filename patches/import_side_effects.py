"""Importing upstream leaves the process as it was.

What breaks: `import sgl_jax.srt.entrypoints.engine` makes every event loop that the host creates
afterwards uvloop's, and executors created afterwards are no longer joined at exit. Any import of
upstream's scheduler also gives the root logger a handler, so that the host's own
`logging.basicConfig()` does nothing. And the first step of an engine puts a native handler in front
of the host's own for SIGTERM and its like: three seconds after a SIGTERM the process is aborted,
whatever the host does about the signal.

Why: Three modules call `asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())` when imported,
and two set `threading._register_atexit` to a function that does nothing. The logger's
handler is absl's, imported by way of orbax; the signals' is absl's too, installed by JAX's test
utilities, which a step imports to count compilations.

What we change: Those modules are imported with the policy, the exit hook and the root logger's
handlers put back afterwards, and `jax._src.test_util`, where JAX has it, without the signals'
handler. A module that the host has imported already is left as it is, and its effects with it. A
revert undoes nothing: there is nothing to undo. So `is_needed` says what an import would do, by
looking at the modules' top-level statements without importing them.

Remove when: Upstream's modules do neither at import.
"""

import ast
import contextlib
import importlib.util
from pathlib import Path

from patches import _imports
from patches._patch import Patch, PatchError

# In the order in which they import each other.
_MODULES = (
    "sgl_jax.srt.managers.tokenizer_manager",
    "sgl_jax.srt.entrypoints.engine",
    "sgl_jax.srt.entrypoints.http_server",
)
# Upstream imports it in the middle of a step.
_TEST_UTILITIES = "jax._src.test_util"
_CHANGES = {"asyncio.set_event_loop_policy", "threading._register_atexit"}


def _is_needed() -> bool:
    return any(_changes_process(_source(name)) for name in _MODULES)


def _source(name: str) -> str:
    package, *rest = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise PatchError(f"{name}: {package} is not installed")
    return Path(spec.origin).parent.joinpath(*rest).with_suffix(".py").read_text(encoding="utf-8")


def _changes_process(source: str) -> bool:
    """Tell whether a top-level statement sets the loop policy or threading's exit hook."""
    changed: list[ast.expr] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            changed.append(statement.value.func)
        elif isinstance(statement, ast.Assign):
            changed.extend(statement.targets)
    return not _CHANGES.isdisjoint(map(ast.unparse, changed))


def _import_all() -> None:
    for name in _MODULES:
        _imports.import_quietly(name)
    with contextlib.suppress(ImportError):  # a JAX that has them elsewhere, or not at all
        _imports.import_quietly(_TEST_UTILITIES)


PATCH = Patch(
    name="import_side_effects",
    issue="not reported",
    replaced=(),
    probe=_is_needed,
    prepare=_import_all,
    concerns=_MODULES,
)
