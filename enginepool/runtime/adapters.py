"""Loads, replaces and unloads adapters: on every engine or on none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginepool.dispatch.request import Request
from enginepool.engine.jobs import EngineBroken
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, InvalidRequest, WeightUpdateFailed
from enginepool.lora.adapter import Adapter
from enginepool.lora.source import read_adapter
from enginepool.runtime.quiesce import EngineGroup, SwapMode, quiesced
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.staging import naming
from enginepool.runtime.swap_options import Options
from enginepool.runtime.update_lock import reading, updating
from enginepool.values import shown

if TYPE_CHECKING:  # it imports sgl_jax; patches come first
    from enginepool.engine.adapter_slots import AdapterSlots, Placed


@dataclass(frozen=True)
class AdapterReport:
    """The report that `load_lora_adapter` returns.

    Attributes:
        weight_version: The label that results carry in `lora_versions` from now on.
        nbytes: Bytes of the adapter as it was given.
        seconds: Seconds of each phase. "stage": read the adapter and put it on every device.
            "commit": until all engines had it. "total".
        engines: How many have it in a slot. The others take it when a request asks for it.
    """

    lora_name: str
    weight_version: int | str
    mode: str
    rank: int
    nbytes: int
    seconds: dict[str, float]
    engines: int

    def to_dict(self) -> dict[str, Any]:
        """For logs: plain numbers, words and dicts."""
        return asdict(self)


def load_adapter(
    runtime: Runtime,
    name: str,
    source: Any,
    config: Mapping[str, Any] | None,
    weight_version: int | str | None,
    mode: SwapMode,
) -> AdapterReport:
    """See `EnginePool.load_lora_adapter`."""
    options = Options(weight_version, mode)
    check_load(runtime, name)
    with updating(runtime, "load_lora_adapter()") as workers:
        load = AdapterLoad(runtime, workers, name)
        load.stage(source, config, options.weight_version)
        return load.commit(workers, options.mode)


def check_load(runtime: Runtime, name: Any) -> None:
    runtime.adapters.check_enabled(name, "lora_name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"lora_name={shown(name)}: expected a name")


def unload_adapter(runtime: Runtime, name: str) -> None:
    """See `EnginePool.unload_lora_adapter`."""
    with runtime.steering.hold("unload_lora_adapter()"):
        runtime.adapters.remove(name)


class AdapterLoad:
    """One version of an adapter on its way into the engines.

    Attributes:
        new: The version, once it is staged.
    """

    new: Adapter

    def __init__(self, runtime: Runtime, workers: Sequence[EngineWorker], name: str) -> None:
        self._runtime, self._workers = runtime, workers
        self._name = name
        self._placed: dict[int, Placed] = {}
        # By engine: the versions that its requests had before.
        self._had: dict[int, dict[Request, Adapter]] = {}
        self._seconds = 0.0

    def stage(
        self, source: Any, config: Mapping[str, Any] | None, version: int | str | None
    ) -> None:
        started = time.perf_counter()
        adapters = self._runtime.adapters
        adapters.check_room(self._name)
        old = adapters.get(self._name)
        if config is None and old is not None and isinstance(source, Mapping):
            config = old.config
        with reading(self._runtime, self._workers[0]):
            self.new = self._read(source, config, version)
        self._seconds = time.perf_counter() - started

    def commit(self, workers: Sequence[EngineWorker], mode: SwapMode) -> AdapterReport:
        """
        Args:
            workers: The engines that serve now. One that was not there at `stage` copies the
                adapter from the host.
        """
        started, new = time.perf_counter(), self.new
        self._workers, self._had = workers, {}
        adapters = self._runtime.adapters
        adapters.check_room(self._name)
        old = adapters.get(self._name)
        new.line = new.number if old is None else old.line
        in_slots = self._commit(new, old, mode)
        seconds = time.perf_counter() - started
        return AdapterReport(
            self._name,
            new.version,
            mode,
            new.rank,
            new.nbytes,
            {"stage": self._seconds, "commit": seconds, "total": self._seconds + seconds},
            in_slots,
        )

    def _read(
        self, source: Any, config: Mapping[str, Any] | None, version: int | str | None
    ) -> Adapter:
        lead = self._workers[0].scheduler
        slots = _slots(self._workers[0])
        found = read_adapter(
            source,
            config,
            lead.hugging_face.paths,
            slots.layers,
            slots.rank,
            download_dir=lead.server_args.download_dir,
        )
        arrays = {path: (np.array(a), np.array(b)) for path, (a, b) in found.arrays.items()}
        slots.check_finite(arrays)
        for worker in self._workers:
            try:
                with naming(worker):
                    self._placed[worker.index] = _slots(worker).place(found.arrays)
            except WeightUpdateFailed:
                if worker.condition.reachable:
                    raise
                # It has failed. When it comes back, it copies the adapter from the host.
        number = self._runtime.adapters.next_number()
        return Adapter(
            self._name,
            number if version is None else version,
            number,
            found.scale,
            dict(found.config),
            arrays,
            str(source) if isinstance(source, str | Path) else None,
        )

    def _commit(self, new: Adapter, old: Adapter | None, mode: SwapMode) -> int:
        """Returns how many engines have it in a slot."""
        adapters, workers = self._runtime.adapters, self._workers
        if old is None or mode in ("drain", "abort"):
            # Both versions have slots until the old one's requests have ended.
            count = self._on_all(EngineGroup(self._runtime, workers), self._put, new)
            adapters.set(new)
            if mode == "abort":
                self._abort()
            return count
        with quiesced(self._runtime, workers, mode) as engines:
            count = self._on_all(engines, self._replace, new)
            for each in self._replaced(new):
                each.successor = new
            old.successor = new
            adapters.set(new)
        return count

    def _replaced(self, new: Adapter) -> list[Adapter]:
        """Older versions that waiting or running requests still have."""
        waiting = [request.adapter for request in self._runtime.dispatch.unfinished()]
        had = [adapter for mine in self._had.values() for adapter in mine.values()]
        return [
            adapter
            for adapter in (*waiting, *had)
            if adapter not in (None, new) and adapter.line == new.line and adapter.successor is None
        ]

    def _on_all(
        self,
        engines: EngineGroup,
        job: Callable[[EngineWorker, Adapter], bool],
        new: Adapter,
    ) -> int:
        """Run a job on every engine or, if one fails, on none. Returns how many returned True."""

        def run(worker: EngineWorker) -> bool:
            with naming(worker):
                return job(worker, new)

        try:
            done = engines.run(run)
        except BaseException:
            with suppress(EnginePoolError):  # the first error says more
                engines.run(lambda worker: self._put_back(worker, new))
            raise
        return sum(done.values())

    def _put(self, worker: EngineWorker, new: Adapter) -> bool:
        """Load the new version into a slot. Runs on the engine's thread."""
        in_use = worker.channel.running.adapters()
        return _slots(worker).load(new, in_use, self._placed.pop(worker.index, None))

    def _replace(self, worker: EngineWorker, new: Adapter) -> bool:
        """Let requests of older versions continue with this one. Runs on the engine's thread."""
        before = worker.channel.running.replace_adapter(new)
        self._had[worker.index] = before
        numbers = list(dict.fromkeys(adapter.number for adapter in before.values()))
        if not numbers:
            return self._put(worker, new)
        _slots(worker).replace(numbers, new, self._placed.pop(worker.index, None))
        return True

    def _put_back(self, worker: EngineWorker, new: Adapter) -> None:
        """Remove the new version and restore the ones before it. Runs on the engine's thread."""
        slots = _slots(worker)
        slots.forget(new.number)
        for request, adapter in self._had.get(worker.index, {}).items():
            worker.channel.running.take_over(request, keep=True)
            request.adapter = adapter
        for adapter in set(self._had.get(worker.index, {}).values()):
            try:
                slots.load(adapter, worker.channel.running.adapters())
            except Exception as error:  # its requests resume on other engines
                raise EngineBroken(f"could not put an adapter back: {error!r}") from error

    def _abort(self) -> None:
        """End the requests that run under another version."""
        dispatch, new = self._runtime.dispatch, self.new
        held = {rid for w in self._runtime.workers for rid in list(w.channel.running.held)}
        running = [
            request
            for request in dispatch.unfinished()
            if request.adapter is not None
            and request.adapter.line == new.line
            and request.adapter is not new
            and (request.begun or request.internal_rid in held)
        ]
        dispatch.abort(running, "load_lora_adapter(mode='abort')", "cancelled")


def _slots(worker: EngineWorker) -> AdapterSlots:
    slots = worker.scheduler.adapters
    assert slots is not None, "the pool has no adapters"
    return slots
