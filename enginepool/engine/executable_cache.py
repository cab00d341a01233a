"""One compilation for all engines of a pool, where the platform allows it.

Every engine compiles the same programs for another device. On CPU an executable is serialized
once it is compiled, and loaded for the other devices instead of being compiled again. The key is
JAX's own persistent cache key without the device assignment (which JAX leaves out on GPU only).
On TPU executables are not moved between devices (jax issue 38004, sglang-jax issue 1216).

This wraps one private function of JAX, in effect only on the threads that ask for it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import cache_key, compilation_cache, compiler

from enginepool.engine.limiter import Limiter

_thread = threading.local()
_lock = threading.Lock()
_users = 0
_original: Any = None


# Seconds for which a warm-up may trace and lower without compiling; then it does not, it hangs.
_PATIENCE = 60.0


class ExecutableCache:
    """Serialized executables by program. Thread-safe; two threads that need the same program
    at once compile it once.

    Attributes:
        limiter: For warm-ups that go on at once: what is Python in one, and XLA's part in others.
    """

    def __init__(self) -> None:
        self.limiter = Limiter(1, _PATIENCE)
        self._serialized: dict[bytes, bytes] = {}
        self._compiling: dict[bytes, threading.Lock] = {}
        self._lock = threading.Lock()
        self.compiled = 0
        self.reused = 0

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Serve this thread's compilations from the cache."""
        outer = getattr(_thread, "cache", None)
        _thread.cache = self
        _install()
        try:
            yield
        finally:
            _thread.cache = outer
            _uninstall()

    def load_or_compile(self, backend: Any, module: Any, devices: Any, options: Any) -> Any:
        key = _program_key(module, options)
        with self._lock:
            compiling = self._compiling.setdefault(key, threading.Lock())
        with compiling:
            serialized = self._serialized.get(key)
            if serialized is not None:
                self.reused += 1
                return backend.deserialize_executable(serialized, devices, options)
            executable = _original(backend, module, devices, options, [])
            serialize = getattr(executable, "serialize", None)
            self._serialized[key] = (
                serialize() if serialize else backend.serialize_executable(executable)
            )
            self.compiled += 1
            return executable


def _program_key(module: Any, options: Any) -> bytes:
    digest = hashlib.sha256()
    cache_key._hash_computation(digest, module, cache_key.IgnoreCallbacks.NO)
    cache_key._hash_serialized_compile_options(digest, options, strip_device_assignment=True)
    return digest.digest()


def _compile_and_load(
    backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
) -> Any:
    cache = getattr(_thread, "cache", None)
    if cache is None:
        return _original(backend, module, executable_devices, options, host_callbacks)
    # A host callback is an address baked into the program: such a program is not shared. Nor is
    # any where the host has a persistent cache: an executable that was loaded serializes to one
    # without its functions, and JAX would write that to the host's cache.
    shared = (
        backend.platform == "cpu"
        and not host_callbacks
        and not compilation_cache.is_persistent_cache_enabled()
    )
    with cache.limiter.released():
        if shared:
            return cache.load_or_compile(backend, module, executable_devices, options)
        return _original(backend, module, executable_devices, options, host_callbacks)


def _install() -> None:
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = compiler.backend_compile_and_load
            compiler.backend_compile_and_load = _compile_and_load


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            compiler.backend_compile_and_load = _original
