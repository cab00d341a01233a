"""Import upstream without its effects on the process."""

from __future__ import annotations

import asyncio.events
import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

# Without the lock, two threads could import at once. One would then save the state that the other's
# import has changed.
_lock = threading.RLock()


def import_quietly(name: str) -> ModuleType:
    """Return the module. If it is imported now, the process's state is put back afterwards.

    The environment is not put back: the two variables that change are JAX's own, for its native
    code.
    """
    if name in sys.modules:
        return importlib.import_module(name)
    with _lock, _preserved():
        return importlib.import_module(name)


@contextlib.contextmanager
def _preserved() -> Iterator[None]:
    """Put back the event-loop policy, threading's exit hook, and the root logger's handlers and
    level. Meanwhile no native signal handler can be installed."""
    root = logging.getLogger()
    # This reads the private name, because get_event_loop_policy() would create a policy, and Python
    # 3.14 deprecates it.
    policy = asyncio.events._event_loop_policy  # type: ignore[attr-defined]
    register_atexit = threading._register_atexit  # type: ignore[attr-defined]
    handlers, level = list(root.handlers), root.level
    util: Any = _signal_handler_installer()
    install = util.install_failure_signal_handler
    util.install_failure_signal_handler = lambda *_, **__: None
    try:
        yield
    finally:
        util.install_failure_signal_handler = install
        asyncio.events._event_loop_policy = policy  # type: ignore[attr-defined]
        threading._register_atexit = register_atexit  # type: ignore[attr-defined]
        # Orbax imports absl, which calls logging.basicConfig(). The host's own call would then do
        # nothing.
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)


def _signal_handler_installer() -> Any:
    """The module whose `install_failure_signal_handler` JAX's test utilities call. A stand-in if
    this JAX has no such module."""
    try:
        util = importlib.import_module("jax._src.util")
    except ImportError:
        util = None
    if hasattr(util, "install_failure_signal_handler"):
        return util
    return SimpleNamespace(install_failure_signal_handler=None)
