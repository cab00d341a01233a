"""Compiles what the first swap needs, on a thread of its own, once all engines serve.

It runs the code of a swap with shapes in place of arrays. So it holds no weights, and runs nothing
on a device. Programs that gather sharded arrays are not compiled here, but by the first swap that
needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidWeights
from enginepool.logs import logger
from enginepool.runtime.staging import choose_staging, put
from enginepool.weights.checkpoint import Checkpoint
from enginepool.weights.fingerprint import compile_fingerprint
from enginepool.weights.fit import Fits
from enginepool.weights.plan import Plan
from enginepool.weights.sources import Source


class SwapPrograms:
    """The programs of a swap whose source has the names, shapes and dtypes of the checkpoint."""

    def __init__(self, name: str, fits: Fits, cache: ExecutableCache) -> None:
        """
        Args:
            name: The name of the pool.
        """
        self._name = name
        self._fits = fits
        self._cache = cache
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, workers: Sequence[EngineWorker]) -> None:
        """Begin to compile, unless `stop` was called. An error is logged, and the first swap then
        compiles by itself."""
        if self._stopping.is_set():
            return
        # A daemon, so that a script which forgets to close exits; `stop` joins it.
        self._thread = threading.Thread(
            target=self._main, args=[workers], name=f"{self._name}-swap-programs", daemon=True
        )
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Compile no further program, and wait for the one that is being compiled.

        A swap calls this first: the mapping of names and `Fits` are used by one thread at a time.

        Returns:
            Whether the thread ended within `timeout` seconds.
        """
        self._stopping.set()
        return self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until everything is compiled; False if it is not after `timeout` seconds."""
        # The garbage collector may run on the thread itself, and close a pool that was dropped.
        if self._thread in (None, threading.current_thread()):
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self, workers: Sequence[EngineWorker]) -> None:
        try:
            with self._cache.sharing():
                for _ in self._compiled(workers):
                    if self._stopping.is_set():
                        return
        except Exception as error:
            if not self._stopping.is_set():  # else the engines may be gone already
                logger().info(
                    "enginepool.swap_not_compiled_ahead", pool=self._name, error=repr(error)
                )

    def _compiled(self, workers: Sequence[EngineWorker]) -> Iterator[None]:
        """Compiles one or a few programs at each step of the iterator."""
        leaves = workers[0].leaves
        if leaves.quantized and leaves.quantization is None:
            return  # no swap changes this model
        # On several devices no single program converts a leaf. Only quantizing has a program.
        if len(leaves.devices) == 1 or leaves.quantization is not None:
            yield from self._conversion(workers)
        for worker in workers:
            yield from compile_fingerprint(worker.leaves.specs)

    def _conversion(self, workers: Sequence[EngineWorker]) -> Iterator[None]:
        mapping, leaves = workers[0].scheduler.hugging_face, workers[0].leaves
        yield
        there = _tensors(mapping.directory)
        specs: dict[str, Any] = {
            name: there[name]
            if name in there
            else jax.ShapeDtypeStruct(mapping.source_shape(path), leaves.source_specs[path].dtype)
            for name, path in mapping.paths.items()
        }
        source = Source(False, specs, specs.__getitem__)
        plan = Plan(source, leaves, mapping, self._fits, strict=True)
        stream = choose_staging(plan, workers, copy=False) == "stream"
        for batch in plan.batches(by_leaf=stream):
            if len(leaves.devices) > 1:
                batch = [piece for piece in batch if piece.quantizer is not None]
            if batch:
                put(plan, batch, workers[:1] if stream else workers, copy=False)
            yield


def _tensors(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The specs of the checkpoint's tensors. Empty if it has no files, because the engines were
    made with dummy weights."""
    try:
        return Checkpoint(directory).specs
    except InvalidWeights:
        return {}
