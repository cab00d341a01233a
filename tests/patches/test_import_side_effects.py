"""The side effects of importing upstream's Engine, in fresh processes."""

import asyncio.events
import json
import logging
import subprocess
import sys
import threading
from functools import cache
from typing import Any

import pytest

from patches import _imports
from tests.support.marks import slow

SCRIPT = """
import asyncio.events, json, logging, os, signal, sys, threading
import jax
register, environment, caught = threading._register_atexit, dict(os.environ), []
signal.signal(signal.SIGTERM, lambda *_: caught.append("by the host"))
{action}
import sgl_jax.srt.entrypoints.http_server
policy = asyncio.events._event_loop_policy
print(json.dumps({{
    "policy": policy and type(policy).__module__,
    "register_atexit": threading._register_atexit is register,
    "handlers": len(logging.getLogger().handlers),
    "environment": dict(os.environ) == environment,
}}))
import jax._src.test_util  # as upstream does in a step
os.kill(os.getpid(), signal.SIGTERM)
print(*caught, flush=True)
os._exit(0)  # before that handler aborts the process
"""
WITHOUT = ""
WITH = "import patches; assert patches.apply(patches.ALL[:1]) == [patches.ALL[0]]"


@cache
def script(action: str) -> tuple[dict[str, Any], str, str]:
    """The state of the process after the import, the handlers that got the signal, and standard
    error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(action=action)],
        capture_output=True,
        text=True,
        check=True,
    )
    *_, state, caught = done.stdout.splitlines()
    return json.loads(state), caught, done.stderr


@pytest.mark.slow
def test_upstream_changes_the_process() -> None:
    """Without the patch, the event loop policy is uvloop's, the exit hook is gone, and the root
    logger is configured."""
    state, *_ = script(WITHOUT)
    assert state == {
        "policy": "uvloop",
        "register_atexit": False,
        "handlers": 1,
        "environment": True,
    }


def test_the_process_stays_as_found() -> None:
    """With the patch, the import changes no policy, exit hook, root logger or environment."""
    state, *_ = script(WITH)
    assert state == {
        "policy": None,
        "register_atexit": True,
        "handlers": 0,
        "environment": True,
    }


@pytest.mark.parametrize(
    ("action", "native"), [(WITH, False), *slow((WITHOUT, True))], ids=["with", "without"]
)
def test_the_hosts_signal_handlers(action: str, native: bool) -> None:
    """JAX's test utilities install a native handler before the host's, which aborts the process
    after three seconds. With the patch only the host's handler runs."""
    _, caught, errors = script(action)
    assert caught == "by the host"
    assert ("*** SIGTERM received" in errors) == native


def test_the_host_keeps_its_own_policy(monkeypatch):
    """The identical objects that the host had set are put back."""
    policy, handler = object(), logging.NullHandler()
    monkeypatch.setattr(asyncio.events, "_event_loop_policy", policy)
    monkeypatch.setattr(threading, "_register_atexit", register := lambda *args: None)
    root = logging.getLogger()
    before = list(root.handlers)
    with _imports._preserved():
        asyncio.events._event_loop_policy = None
        threading._register_atexit = None
        root.addHandler(handler)
    assert asyncio.events._event_loop_policy is policy
    assert threading._register_atexit is register
    assert root.handlers == before
