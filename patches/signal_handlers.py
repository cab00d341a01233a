"""No signal handlers off the main thread.

What breaks: An Engine cannot be built off the main thread: `ValueError: signal only works in main
thread of the main interpreter`. In single-process mode it also breaks the host's multiprocessing: a
later SharedMemory or Lock raises `OSError: Bad file descriptor`.

Why: `_set_envs_and_config` installs handlers on whichever thread it runs: for SIGCHLD (which reaps
the exit codes of the host's children) and for SIGQUIT (which kills the process). It also sets the
file descriptor of multiprocessing's resource tracker to -1.

What we change: In that module the name `signal` is a namespace whose `signal()` does nothing off
the main thread. Python's signal module itself stays as it is. Off the main thread the resource
tracker's descriptor is put back, because the process belongs to the host. The raised limits on
files and stack and the start method of multiprocessing stay, because they do no harm to the host.
On the main thread nothing changes: there an Engine owns the process.

Remove when: Upstream installs handlers on the main thread only, as SGLang does since
https://github.com/sgl-project/sglang/pull/18752, and leaves the resource tracker.
"""

import signal
import threading
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import Any

from patches._lookup import ModuleProxy, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.entrypoints.engine"


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_needed(_, set_envs_and_config) -> bool:
    """Run that part of upstream's function which installs handlers, on another thread."""
    errors = []
    function = with_globals(
        set_envs_and_config,
        set_ulimit=lambda: None,
        mp=SimpleNamespace(set_start_method=lambda *args, **kwargs: None),
        signal=signal,
    )

    def run():
        try:
            function(SimpleNamespace(enable_single_process=False))
        except ValueError as exc:  # Raised before a handler is installed.
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return bool(errors)


def _guarded_signal(signalnum, handler):
    return signal.signal(signalnum, handler) if _on_main_thread() else None


def _replace_signal(original):
    return ModuleProxy(original, signal=_guarded_signal)


def _replace_set_envs_and_config(original):
    def set_envs_and_config(server_args):
        if _on_main_thread():
            return original(server_args)
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        # Held, so that no other thread sees -1.
        with tracker._lock:
            descriptor = tracker._fd
            try:
                return original(server_args)
            finally:
                tracker._fd = descriptor

    return set_envs_and_config


PATCH = Patch(
    name="signal_handlers",
    issue="not reported",
    replaced=(
        Target(_MODULE, "signal", _replace_signal),
        Target(_MODULE, "_set_envs_and_config", _replace_set_envs_and_config, ("server_args",)),
    ),
    probe=_is_needed,
)
