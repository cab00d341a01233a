"""Decides which version of an adapter a request uses, and gives batches the slots of their
adapters.

Reaches into upstream's model worker: `prepare_lora_batch` is replaced.

What breaks: Upstream looks for a batch's adapters among those of its own manager.
Why: See `lora/layers.py`.
Remove when: With `lora/layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.running import RunningRequests
from enginepool.lora.adapter import Adapter, Adapters
from enginepool.lora.slot_policy import SlotPolicy

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch

    from enginepool.dispatch.request import Request


class AdapterAdmission:
    """The adapters of one engine's requests. Used on the engine's thread.

    Args:
        adapters: The pool's adapters.
        slots: The engine's slots.
        running: The requests that the engine has.
    """

    def __init__(self, adapters: Adapters, slots: AdapterSlots, running: RunningRequests) -> None:
        self._adapters, self._slots, self._running = adapters, slots, running

    def may_start(self) -> Callable[[Request], bool]:
        """See `StepScheduler.may_start`: whether a request's adapter finds a slot."""
        policy = SlotPolicy(self._slots.numbers, self._running.adapters(), self._slots.count)

        def ask(request: Request) -> bool:
            # If the request cannot start yet, it is asked again, maybe with a newer version.
            adapter = self._adapters.for_start(request.adapter, begun=request.begun)
            request.adapter = adapter
            return policy.may_start(None if adapter is None else adapter.number)

        return ask

    def admit(self, request: Request) -> None:
        """Put the adapter of a request that `may_start` into a slot."""
        adapter = request.adapter
        if adapter is not None and not self._slots.load(adapter, self._running.adapters()):
            raise RuntimeError(f"no slot is free for adapter {adapter.name!r}")

    def install(self, worker: Any) -> None:
        """Have upstream call `_prepare` before each forward."""
        worker.prepare_lora_batch = self._prepare

    def _prepare(self, batch: ModelWorkerBatch) -> None:
        def find(lora_id: str) -> Adapter | None:
            request = self._running.held.get(lora_id)
            return None if request is None else request.adapter

        self._slots.prepare(batch, find)
