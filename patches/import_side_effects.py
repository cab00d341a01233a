"""Importing upstream leaves the process as it was.

What breaks: After `import sgl_jax.srt.entrypoints.engine` new event loops are uvloop's, and new
executors are not joined at exit. An import of upstream's scheduler gives the root logger a handler,
so the host's own `logging.basicConfig()` does nothing. The first step of an engine installs a
native handler for SIGTERM and similar signals: three seconds after a SIGTERM the process is
aborted, whatever the host does.

Why: Three modules call `asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())` when they are
imported. Two set `threading._register_atexit` to a function that does nothing. The logger's handler
is absl's, which orbax imports. The signal handler is absl's too. JAX's test utilities install it,
and a step imports them to count compilations.

What we change: Those modules are imported with the policy, the exit hook and the root logger's
handlers put back afterwards. `jax._src.test_util`, where JAX has it, is imported without the signal
handler. A module that the host has imported already stays as it is. A revert undoes nothing.
`is_needed` looks at the modules' top-level statements and does not import them.

Remove when: Upstream's modules do none of this at import.
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
