"""Compiles each program once for all engines of a pool, if the platform allows it.

Every engine needs the same programs for another device. On CPU a compiled executable is serialized,
and loaded for the other devices instead of being compiled again. The key is that of JAX's
persistent cache without the device assignment (JAX itself leaves that out on GPU only).
On TPU executables are not moved between devices (jax issue 38004, sglang-jax issue 1216).

Reaches into private parts of JAX. Only threads inside `sharing` are affected.

What breaks: Without this every engine compiles for itself. Four engines take four times as long.
Why: JAX's own persistent cache has the device in its key on CPU, and belongs to the host.
Remove when: JAX loads a program that was compiled for one device onto another of the same kind.

If this JAX has other parts, engines compile for themselves, and the log says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from enginepool.engine.common_programs import CommonPrograms
from enginepool.engine.gil_limiter import Limiter
from enginepool.logs import logger
from enginepool.process.cores import usable_cores
from enginepool.process.precision import MatmulPrecision

_thread = threading.local()
_lock = threading.Lock()
_users = 0
_original: Any = None


# A warm-up that traces and lowers for this many seconds without compiling counts as hung.
_PATIENCE = 60.0
# Threads that compile ahead. Each program in XLA takes memory of the host.
_THREADS_AHEAD = 8


class _Jax(NamedTuple):
    """The private parts of JAX that sharing needs."""

    compiler: Any  # its `backend_compile_and_load` is replaced
    cache_key: Any
    compilation_cache: Any  # the host's
    nothing_ignored: Any  # what `_hash_computation` takes to hash the whole program


_COMPILE = ("backend", "module", "executable_devices", "options", "host_callbacks")


@functools.cache
def _jax() -> _Jax | None:
    """The parts; None if this JAX has others."""
    try:
        from jax._src import cache_key, compilation_cache, compiler

        _expect(compiler.backend_compile_and_load, _COMPILE)
        *known, ignored = inspect.signature(cache_key._hash_computation).parameters
        if known != ["hash_obj", "module"]:
            raise TypeError(f"_hash_computation: found parameters {(*known, ignored)}")
        # JAX's own key hashes the whole program by default. Its name for that has changed.
        nothing_ignored = inspect.signature(cache_key.get).parameters[ignored].default
        if nothing_ignored is inspect.Parameter.empty:
            raise TypeError(f"cache_key.get: no default for {ignored}")
        _expect(
            cache_key._hash_serialized_compile_options,
            ("hash_obj", "compile_options_obj", "strip_device_assignment"),
        )
        _expect(compilation_cache._get_cache, ("backend",))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger().warning("enginepool.executables_not_shared", jax=jax.__version__, why=str(error))
        return None
    return _Jax(compiler, cache_key, compilation_cache, nothing_ignored)


def _expect(function: Any, parameters: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise TypeError(f"{function.__name__}: expected parameters {parameters}, found {found}")


class ExecutableCache:
    """Serialized executables by program. Thread-safe; two threads that need the same program
    at once compile it once.

    Attributes:
        limiter: Lets one warm-up run Python at a time; others are in XLA meanwhile.
        serialized: Executables by program.
        programs: Programs that are traced once for all engines.
    """

    def __init__(
        self,
        serialized: MutableMapping[bytes, bytes] | None = None,
        programs: CommonPrograms | None = None,
    ) -> None:
        """
        Args:
            serialized: Where the executables are kept. By default they are in memory, and live as
                long as the cache.
            programs: The programs that are traced already.
        """
        self.limiter = Limiter(1, _PATIENCE)
        self.serialized = {} if serialized is None else serialized
        self.programs = CommonPrograms() if programs is None else programs
        self._compiling: dict[bytes, threading.Lock] = {}
        self._lock = threading.Lock()
        self.compiled = 0
        self.reused = 0

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Serve this thread's compilations from the cache."""
        parts = _jax()
        if parts is None:
            yield
            return
        outer = getattr(_thread, "cache", None)
        _thread.cache = self
        _install(parts.compiler)
        try:
            yield
        finally:
            _thread.cache = outer
            _uninstall(parts.compiler)

    def load_or_compile(self, backend: Any, module: Any, devices: Any, options: Any) -> Any:
        key = _program_key(module, options)
        with self._lock:
            compiling = self._compiling.setdefault(key, threading.Lock())
        with compiling:
            serialized = self.serialized.get(key)
            if serialized is not None:
                self.reused += 1
                return backend.deserialize_executable(serialized, devices, options)
            executable = _original(backend, module, devices, options, [])
            serialize = getattr(executable, "serialize", None)
            self.serialized[key] = (
                serialize() if serialize else backend.serialize_executable(executable)
            )
            self.compiled += 1
            return executable


@contextmanager
def compiling_ahead(jobs: Sequence[Callable[[], None]]) -> Iterator[None]:
    """While the block runs, let other threads compile what this thread needs after it. So XLA uses
    several cores. A thread that shares no cache compiles nothing ahead.

    Args:
        jobs: Each compiles something. They begin in this order.

    Raises:
        Exception: What a job raised, at the end of the block.
    """
    cache: ExecutableCache | None = getattr(_thread, "cache", None)
    if cache is None or not jobs:
        yield
        return

    precision = MatmulPrecision()

    def ahead(job: Callable[[], None]) -> None:
        with cache.sharing(), cache.limiter.held(), precision.on_this_thread():
            job()

    threads = min(_THREADS_AHEAD, max(1, usable_cores() - 1))
    with ThreadPoolExecutor(threads, "compile-ahead") as executor:
        compiling = [executor.submit(ahead, job) for job in jobs]
        try:
            yield
        finally:
            with cache.limiter.released():
                wait(compiling)
        for each in compiling:
            each.result()


def common_programs() -> CommonPrograms:
    """The programs of the cache that this thread shares. Without a cache, a new set for the caller
    alone."""
    cache = getattr(_thread, "cache", None)
    return CommonPrograms() if cache is None else cache.programs


def _program_key(module: Any, options: Any) -> bytes:
    parts = _jax()
    assert parts is not None  # `sharing` has checked it
    cache_key, digest = parts.cache_key, hashlib.sha256()
    cache_key._hash_computation(digest, module, parts.nothing_ignored)
    cache_key._hash_serialized_compile_options(digest, options, strip_device_assignment=True)
    return digest.digest()


def _compile_and_load(
    backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
) -> Any:
    cache = getattr(_thread, "cache", None)
    if cache is None:
        return _original(backend, module, executable_devices, options, host_callbacks)
    with cache.limiter.released():
        # A host callback is an address baked into the program: such a program is not shared.
        if backend.platform == "cpu" and not host_callbacks and not _host_caches(backend):
            executable = cache.load_or_compile(backend, module, executable_devices, options)
            if not _host_caches(backend):  # it may have been switched on meanwhile
                return executable
        return _original(backend, module, executable_devices, options, host_callbacks)


def _host_caches(backend: Any) -> bool:
    """Whether JAX would write the executable to the host's persistent cache. An executable that was
    loaded from there cannot be serialized again: the copy would lack functions and could not run.

    JAX keeps the cache that it first used, whatever its configuration says later.
    """
    parts = _jax()
    assert parts is not None
    return parts.compilation_cache._get_cache(backend) is not None


def _install(compiler: Any) -> None:
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = compiler.backend_compile_and_load
            compiler.backend_compile_and_load = _compile_and_load


def _uninstall(compiler: Any) -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            compiler.backend_compile_and_load = _original
