"""One engine on its devices, and everything that belongs to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from enginepool.dispatch.condition import EngineCondition, EngineState, PauseReason
from enginepool.dispatch.queue import RequestQueue
from enginepool.engine.build import Assembly
from enginepool.engine.channel import Channel
from enginepool.engine.gil_limiter import process_limiter
from enginepool.engine.jobs import EngineBroken
from enginepool.engine.start_stages import StartStages
from enginepool.logs import logger
from enginepool.lora.adapter import Adapters

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine

    from enginepool.engine.scheduler import PinnedScheduler
    from enginepool.weights.leaves import EngineLeaves


class PinnedEngine:
    """An engine as other threads see it.

    Attributes:
        index: The engine's index in the pool.
        condition: What the engine does, and what it may do.
        channel: The way into the engine.
        assembly: Makes upstream's Engine, and holds it.
        queue: The pool's queue.
        kept: The engine's own weights, kept while it is rebuilt with them, until it serves again.
    """

    def __init__(
        self,
        index: int,
        devices: Sequence[jax.Device],
        server_args: dict[str, Any],
        queue: RequestQueue,
        *,
        max_decode_steps: int,
        adapters: Adapters,
    ) -> None:
        self.index = index
        self.devices = tuple(devices)
        self.queue = queue
        self.condition = EngineCondition()
        self.channel = Channel(
            index,
            queue,
            process_limiter(),
            self.condition,
            max_decode_steps=max_decode_steps,
            adapters=adapters,
        )
        self.assembly = Assembly(
            server_args, self.devices, self.channel, StartStages(self._log_stage)
        )
        self.kept: Mapping[str, jax.Array] = {}

    def __repr__(self) -> str:
        devices = ",".join(str(device.id) for device in self.devices)
        held = self.channel.load()
        state = self.condition.state.value
        return f"<{type(self).__name__} {self.index} device {devices} [{state}, {held} running]>"

    def _log_stage(self, stage: str) -> None:
        logger().info("enginepool.stage_begun", engine=self.index, stage=stage)

    @property
    def engine(self) -> Engine | None:
        """Upstream's Engine; see `Assembly`."""
        return self.assembly.engine

    @property
    def scheduler(self) -> PinnedScheduler:
        """Upstream's Scheduler. The engine must be built."""
        return self.assembly.built()

    @property
    def leaves(self) -> EngineLeaves:
        """The engine's weights; their specs can be read as long as the pool is open."""
        leaves = self.assembly.leaves
        assert leaves is not None, "the engine was never built"
        return leaves

    # On the engine's thread

    def enter(self) -> None:
        """Open the channel for jobs. If the engine has weights, let it take requests."""
        self.condition.change(EngineState.SERVING)
        self.channel.open()
        if self.condition.serving:
            self._attach()

    def load(self) -> None:
        """As a job: record that the engine has weights again, and let it take requests."""
        if self.condition.weights.missing is not None:
            self.condition.weights.missing = None
            self.condition.change(EngineState.SERVING)
            self._attach()

    def _attach(self) -> None:
        self.queue.attach(self.index, self.condition, self.channel.load, self.channel.wake)

    def pause(self, reason: PauseReason) -> None:
        """As a job: the engine takes no step until `go_on`."""
        self.condition.pause(reason)
        self.queue.paused(self.index)

    def go_on(self, reason: PauseReason) -> None:
        """As a job: drop this reason to pause. Others may be left."""
        self.condition.go_on(reason)

    def drain(self, on: bool) -> None:
        """As a job. With `on`, the engine only finishes requests that have begun. Without, it takes
        new requests again."""
        self.condition.draining = on

    def rebuild_kv_cache(self) -> None:
        """As a job: allocate the KV cache again, without which the engine cannot step.

        Raises:
            EngineBroken: There is not enough memory. The engine leaves its loop.
        """
        try:
            self.scheduler.kv_cache.rebuild()
        except Exception as error:
            raise EngineBroken(f"could not allocate its KV cache again: {error!r}") from error

    def replace_weights(
        self, arrays: Mapping[str, jax.Array], shared: Collection[str]
    ) -> dict[str, jax.Array]:
        """As a job: put these leaves in place. Returns the leaves that were there.

        `RunningRequests.set_weights` completes the update. `restore_weights` undoes it.
        """
        self.condition.weights.being_replaced = True
        return self.leaves.replace(arrays, shared)

    def restore_weights(self, arrays: Mapping[str, jax.Array], shared: Collection[str]) -> None:
        """As a job: cancel the update. Put `arrays` back, if there are any.

        Raises:
            EngineBroken: That failed. The engine leaves its loop, and gets other weights.
        """
        try:
            self.leaves.replace(arrays, shared)
        except Exception as error:
            raise EngineBroken(f"could not put its old weights back: {error!r}") from error
        self.condition.weights.being_replaced = False
