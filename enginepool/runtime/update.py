"""Replaces the weights of all engines: stage, stop the engines, put in place on all or on none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from enginepool.engine.worker import EngineWorker
from enginepool.runtime.commit import commit, leave_without_weights, stream
from enginepool.runtime.memory_occupation import without_kv_caches
from enginepool.runtime.quiesce import EngineGroup, SwapMode, quiesced
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.served_config import check_config
from enginepool.runtime.staging import Staged, check_complete, choose_staging, stage
from enginepool.runtime.swap_options import Options
from enginepool.runtime.swap_report import EngineSwap, QuantizedMatrix, SwapReport
from enginepool.runtime.update_lock import reading
from enginepool.runtime.weight_inspection import swap_fingerprints
from enginepool.weights.plan import Plan
from enginepool.weights.sources import read_source


@dataclass
class Update:
    """One set of new weights on its way into the engines.

    Attributes:
        version: The version that results will carry.
        mode: What happens to running requests; see `EnginePool.update_weights`.
        plan: The leaves that change. It is set when `prepare` has read the source.
        staged: The leaves that were put on the devices, by engine.
    """

    runtime: Runtime
    workers: list[EngineWorker]
    source: Any
    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    staged: dict[int, Staged] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    # The leaves that each engine had before. Freeing them takes time, so it waits until the engines
    # go on.
    before: dict[int, Any] = field(default_factory=dict)
    kv_bytes: int = 0

    def __post_init__(self) -> None:
        self.mode: SwapMode = self.options.mode

    def prepare(self) -> None:
        """Check the source and stage it, if two sets fit. No engine is stopped."""
        started = time.perf_counter()
        self.number = self.runtime.desired.update + 1
        label = self.options.weight_version
        self.version = self.number if label is None else label
        self.runtime.swap_programs.stop()
        with reading(self.runtime, self.workers[0]):
            self.plan = self._plan()
        self.runtime.discard_staged("another set of weights came in between")
        self.staging = self.options.staging
        # A device may have room for a second set only once its KV cache is gone.
        early = self.options.strategy == "atomic" and not self.options.free_kv
        if early and self._choose(self.workers) == "double":
            self._stage(self.plan, self.workers)
        self._add("total", time.perf_counter() - started)

    def attempt(self, mode: SwapMode) -> Update:
        """Make a copy to call `finish` on. If it fails, the caller makes another copy."""
        made = copy(self)
        made.mode = mode
        made.seconds, made.pauses = dict(self.seconds), {}
        return made

    def finish(self) -> SwapReport:
        """Put the weights in place."""
        started = time.perf_counter()
        try:
            self._replace()
        finally:
            self._end_release()
        return self._report(started)

    def _plan(self) -> Plan:
        scheduler = self.workers[0].scheduler
        args = scheduler.server_args
        with self._timed("stage"):
            source = read_source(
                self.source,
                scheduler.leaves.source_specs,
                scheduler.model_config.hf_config.num_hidden_layers,
                download_dir=args.download_dir,
                revision=args.revision,
            )
            mapping = None if source.by_path else scheduler.hugging_face
            strict, fits = self.options.strict, self.runtime.fits
            plan = Plan(source, scheduler.leaves, mapping, fits, strict=strict)
            if source.directory is not None and self.options.strict:
                check_config(source.directory, self.runtime.config)
        check_complete(self.workers, plan)
        return plan

    def _replace(self) -> None:
        """Swap all engines at once."""
        with self._quiesced(self.workers) as engines, self._without_kv(engines):
            if not self.staged:
                self._place(self.plan, engines)
            with self._timed("commit"):
                self._commit(engines)
        self.before.clear()

    def _choose(self, workers: Sequence[EngineWorker]) -> str:
        if self.staging == "auto":
            self.staging = choose_staging(self.plan, workers, self.options.copy)
        return self.staging

    def _stage(self, plan: Plan, workers: Sequence[EngineWorker]) -> None:
        with self._timed("stage"):
            self.staged.update(stage(plan, workers, self.options.copy))
            if plan is self.plan:  # what an iterator has is known only now
                check_complete(self.workers, plan)

    def _place(
        self, plan: Plan, engines: EngineGroup, siblings: Sequence[EngineWorker] = ()
    ) -> None:
        """Stage the leaves on stopped engines, or stream them."""
        if self._choose(engines.workers) == "double":
            self._stage(plan, engines.workers)
            return
        with self._timed("stage"):
            staged, failed = stream(plan, engines, self.options.copy, siblings)
        self.staged.update(staged)
        self.failed.update(failed)

    def _commit(self, engines: EngineGroup) -> None:
        """Put the staged leaves in place on every engine or on none."""
        if self.staging == "double":  # else they are in place already
            self.before = commit(engines, self.staged)
        try:
            self._label_all(engines)
        except KeyboardInterrupt:  # some engines may have the old label
            self._label_all(engines)
            raise

    def _label_all(self, engines: EngineGroup) -> None:
        desired = self.runtime.desired
        desired.weight_version, desired.update = self.version, self.number
        engines.run(self._label)
        # The order matters: waiting requests must never find that no engine is left. First the
        # other engines serve, then engines that missed the update leave. `_end_release` comes last.
        engines.run(self._leave_if_failed)

    def _end_release(self) -> None:
        """Take calls again after `release_weights`, if an engine has the new weights."""
        desired = self.runtime.desired
        if desired.no_weights is not None and desired.update == self.number:
            desired.no_weights = None
            self.runtime.dispatch.fail_unserved()

    def _label(self, worker: EngineWorker) -> None:
        """On the engine's thread: label its next tokens with the new version."""
        if worker.index not in self.failed:
            worker.channel.running.set_weights(self.version, self.number)
            worker.load()

    def _leave_if_failed(self, worker: EngineWorker) -> None:
        if worker.index in self.failed:
            leave_without_weights(worker, self.failed[worker.index])

    @contextmanager
    def _quiesced(self, workers: Sequence[EngineWorker]) -> Iterator[EngineGroup]:
        asked = time.perf_counter()
        with quiesced(self.runtime, workers, self.mode) as engines:
            self._add("quiesce", time.perf_counter() - asked)
            yield engines
        self.pauses.update(engines.pauses)

    @contextmanager
    def _without_kv(self, engines: EngineGroup) -> Iterator[None]:
        if not self.options.free_kv:
            yield
            return
        with without_kv_caches(engines) as dropped:
            try:
                yield
                self.before.clear()  # the KV caches need the memory of these leaves
            except BaseException:
                for worker in engines.workers:  # and of these, which are not used
                    self.staged.get(worker.index, Staged()).arrays.clear()
                raise
        self.kv_bytes += sum(dropped.values())

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add(phase, time.perf_counter() - started)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def _report(self, started: float) -> SwapReport:
        with self._timed("fingerprint"):
            done = [w for w in self.workers if w.index in self.pauses.keys() - self.failed.keys()]
            staged, source, have = swap_fingerprints(self.runtime, self.plan, done, self.staged)
        self._add("total", time.perf_counter() - started)
        return SwapReport(
            weight_version=self.version,
            mode=self.mode,
            strategy=self.options.strategy,
            staging=self.staging,
            nbytes=self.plan.nbytes,
            seconds=self.seconds,
            staged=staged,
            engines=tuple(self._engine(index, one) for index, one in have.items()),
            source=source if self.plan.measured else None,
            quantized={path: QuantizedMatrix(*its) for path, its in self.plan.errors().items()},
            failed=self.failed,
            left=tuple(self.plan.left),
            ignored=tuple(self.plan.ignored),
            kv_bytes=self.kv_bytes,
        )

    def _engine(self, index: int, fingerprint: str) -> EngineSwap:
        shared, made = (len(its) for its in (self.staged[index].shared, self.staged[index].arrays))
        return EngineSwap(index, self.pauses[index], shared, made - shared, fingerprint)
