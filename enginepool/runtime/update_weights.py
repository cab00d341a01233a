"""Replaces the weights of a pool's engines, all at once or one after the other.

`update_weights` does all of it. `stage_weights` (`staged_weights.py`) only stages, and leaves the
rest for later.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.runtime.commit import leave_without_weights
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.swap_options import Options
from enginepool.runtime.swap_report import SwapReport
from enginepool.runtime.update import Update
from enginepool.runtime.update_lock import updating


def update_weights(runtime: Runtime, source: Any, options: Options) -> SwapReport:
    """See `EnginePool.update_weights`."""
    kind = RollingUpdate if options.strategy == "rolling" else Update
    with updating(runtime, "update_weights()") as workers:
        update = kind(runtime, workers, source, options)
        update.prepare()
        return update.finish()


class RollingUpdate(Update):
    """Swaps one engine after the other, while the others serve."""

    def _replace(self) -> None:
        try:
            for worker in self.workers:
                self._swap_or_leave(worker)
        except BaseException as error:
            if isinstance(error, Exception) or not self._has_begun():
                raise
            # Engines that serve have the new weights, so there is no way back. The others get them
            # without a drain, for which the user does not want to wait.
            self.mode = "retract"
            try:
                for worker in self._late():
                    self._swap_or_leave(worker)
            finally:
                for worker in self._late():  # Control-C came again
                    self._leave(worker, error)
            raise

    def _has_begun(self) -> bool:
        """Whether an engine has the new weights."""
        return self.runtime.desired.update == self.number and not self.runtime.closed

    def _late(self) -> list[EngineWorker]:
        """The engines that still have the old weights."""
        return [
            worker
            for worker in self.workers
            if worker.index not in self.failed and worker.condition.weights.update != self.number
        ]

    def _swap_or_leave(self, worker: EngineWorker) -> None:
        try:
            self._swap_one(worker)
        except Exception as error:
            if not self._has_begun():
                raise
            self._leave(worker, error)
            if worker is self.workers[-1] and not self.pauses:
                raise

    def _leave(self, worker: EngineWorker, error: BaseException) -> None:
        """Leave an engine without weights, unless it has the new ones."""
        self.failed[worker.index] = f"its update of weights failed: {str(error) or repr(error)}"
        if worker.condition.weights.update != self.number:
            job = partial(leave_without_weights, worker, self.failed[worker.index])
            with suppress(EngineStopped):  # it comes back with the new weights
                worker.channel.run(job).result()

    def _swap_one(self, worker: EngineWorker) -> None:
        plan, siblings = self.plan, self.workers[1:]
        if worker is not self.workers[0]:
            # A source is read only once, and the first engine's set is in the model's layout. That
            # engine's own leaves are not read: if it has failed, a rebuild may be replacing them.
            first = self.staged[self.workers[0].index]
            plan, siblings = self.plan.again(first.arrays, worker.leaves.specs), []
        if not self.options.free_kv and self._choose(self.workers) == "double":
            self._stage(plan, [worker])
        with self._quiesced([worker]) as engines, self._without_kv(engines):
            if worker.index not in self.staged:
                self._place(plan, engines, siblings)
            with self._timed("commit"):
                self._commit(engines)
        self.before.clear()
