"""Upstream's _set_envs_and_config on and off the main thread."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from types import SimpleNamespace

import pytest

import patches
from patches import signal_handlers
from patches._lookup import module

SIGNALS = (signal.SIGCHLD, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def process_state():
    """Restores what upstream changes in this process."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    # pytest itself may have started no tracker yet.
    resource_tracker.ensure_running()
    descriptor = resource_tracker._resource_tracker._fd
    yield
    resource_tracker._resource_tracker._fd = descriptor
    for number, handler in handlers.items():
        signal.signal(number, handler)


def configure():
    engine = module("sgl_jax.srt.entrypoints.engine")
    engine._set_envs_and_config(SimpleNamespace(enable_single_process=True))


def configure_off_the_main_thread():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(configure).result()


def test_upstream_fails_off_the_main_thread():
    """Without the patch, an Engine cannot be built in a worker thread."""
    with pytest.raises(ValueError, match="main thread"):
        configure_off_the_main_thread()


def test_nothing_is_installed_off_the_main_thread():
    """With the patch it can, and it changes neither the host's signals nor its multiprocessing."""
    before = [signal.getsignal(number) for number in SIGNALS]
    patches.apply([signal_handlers.PATCH])
    configure_off_the_main_thread()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    # Writes to the tracker; EBADF if upstream closed it.
    resource_tracker.register("/enginepool-test", "semaphore")
    resource_tracker.unregister("/enginepool-test", "semaphore")


def test_the_main_thread_keeps_upstream_behaviour():
    """On the main thread the handlers are upstream's, with the patch and without."""
    patches.apply([signal_handlers.PATCH])
    configure()
    assert all(
        signal.getsignal(number).__module__ == "sgl_jax.srt.entrypoints.engine"
        for number in SIGNALS
    )
    assert resource_tracker._resource_tracker._fd == -1


def test_the_signal_module_itself_is_untouched():
    """Other modules see Python's signal module. Upstream's module sees one name of it replaced."""
    original = signal.signal
    patches.apply([signal_handlers.PATCH])
    engine = module("sgl_jax.srt.entrypoints.engine")
    assert signal.signal is original
    assert engine.signal.SIGCHLD is signal.SIGCHLD
    assert engine.os is os
