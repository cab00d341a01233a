"""Weights that are staged on every device and wait for their commit."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidWeights, StaleWeights
from enginepool.frontend.cancellation import async_twin
from enginepool.runtime.quiesce import SwapMode
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.staging import check_complete, stage
from enginepool.runtime.swap_options import Options
from enginepool.runtime.swap_report import SwapReport
from enginepool.runtime.update import Update
from enginepool.runtime.update_lock import updating
from enginepool.weights.name_mismatch import listed


class StagedWeights:
    """A staged weight set, as `EnginePool.stage_weights` returns it. Thread-safe.

    Attributes:
        weight_version: The version that results carry once these are committed.
        nbytes: Bytes that were staged on one engine.
    """

    def __init__(self, runtime: Runtime, update: Update, expires_after: float | None) -> None:
        self.weight_version = update.version
        self.nbytes = update.plan.nbytes
        self._runtime = runtime
        self._update: Update | None = update
        self._why = ""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if expires_after is not None:
            why = f"they have expired, {expires_after:g} seconds after they were staged"
            self._timer = threading.Timer(expires_after, self.make_stale, [why])
            self._timer.daemon = True
            self._timer.name = f"{runtime.name}-staged"
            self._timer.start()

    def __repr__(self) -> str:
        state = "staged" if self._update is not None else self._why
        return f"<StagedWeights {self.weight_version!r} [{state}]>"

    def commit(self, mode: SwapMode = "drain") -> SwapReport:
        """Put them in place on every engine. If anything is wrong, no engine changes. The weights
        stay staged, and you can try again.

        An engine that came back since they were staged gets them from a sibling.

        Args:
            mode: What happens to running requests; see `EnginePool.update_weights`.

        Raises:
            StaleWeights: They were committed or discarded, have expired, or were replaced by other
                weights.
            InvalidWeights: A shared leaf was deleted or donated since.
            WeightUpdateFailed, InvalidRequest, PoolClosed, PoolFailed: As `update_weights`.
        """
        options = Options(mode=mode)
        with updating(self._runtime, "commit()") as workers:
            update = self._update
            if update is None:
                raise StaleWeights(
                    f"the weights {self.weight_version!r} cannot be committed: {self._why}"
                )
            _check_staged(update, workers)
            report = update.attempt(options.mode).finish()
            self.make_stale("they are committed already")
        return report

    def discard(self) -> None:
        """Free them. Does nothing if they are committed or stale."""
        self.make_stale("they were discarded")

    async_commit = async_twin(commit)
    async_discard = async_twin(discard)

    def make_stale(self, why: str) -> None:
        """Make them stale, for this reason. A commit that has begun goes on."""
        with self._lock:
            if self._update is None:
                return
            self._why, self._update = why, None
            timer, self._timer = self._timer, None
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
            timer.join()


def stage_weights(
    runtime: Runtime, source: Any, options: Options, expires_after: float | None
) -> StagedWeights:
    """See `EnginePool.stage_weights`."""
    options = replace(options, staging="double")
    with updating(runtime, "stage_weights()") as workers:
        update = Update(runtime, workers, source, options)
        update.prepare()
        _forget_source(update)
        handle = StagedWeights(runtime, update, expires_after)
        runtime.hold_staged(handle.make_stale)
    return handle


def _forget_source(update: Update) -> None:
    """Drop the caller's arrays: the commit needs only what was staged."""
    lead = update.workers[0]
    update.plan = update.plan.copying(update.staged[lead.index].arrays)
    update.source = None


def _check_staged(update: Update, workers: list[EngineWorker]) -> None:
    """Check that the staged leaves are still there and complete. Engines that came back since get
    copies of another engine's staged leaves.

    Raises:
        InvalidWeights: Some are gone; the error names them.
    """
    update.workers = workers
    for staged in update.staged.values():
        gone = [path for path, array in staged.arrays.items() if array.is_deleted()]
        if gone:
            raise InvalidWeights(
                f"commit: {listed(gone)} were deleted or donated by the owner of the arrays that "
                "stage_weights shared; pass copy=True to keep a copy of them",
                names=gone,
            )
    check_complete(workers, update.plan)
    # Of an engine that serves, if there is one. The device of another may not answer any more.
    first = next((w.index for w in workers if w.index in update.staged), next(iter(update.staged)))
    sibling = update.staged[first]
    for worker in workers:
        if worker.index not in update.staged:
            again = update.plan.again(sibling.arrays, worker.leaves.specs)
            update.staged |= stage(again, [worker], update.options.copy)
