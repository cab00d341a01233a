"""What a trainer calls on a pool: new weights, memory given back, checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from enginepool.pool.calls import CallGroup
from enginepool.runtime import memory_occupation, update, weight_inspection
from enginepool.runtime.quiesce import SwapMode
from enginepool.runtime.staged_weights import StagedWeights, stage_weights
from enginepool.runtime.swap_options import Options, Staging, Strategy
from enginepool.runtime.swap_report import SwapReport
from enginepool.values import seconds


class WeightCalls(CallGroup):
    """The calls of `EnginePool` that change or look at weights and memory. Thread-safe; those
    that change something happen one at a time, in the order in which they get their turn."""

    # Sync

    def update_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        mode: SwapMode = "drain",
        strategy: Strategy = "atomic",
        staging: Staging = "auto",
        strict: bool = True,
        copy: bool = False,
        free_kv: bool = False,
    ) -> SwapReport:
        """Put new weights on every engine: on all or, if anything is wrong, on none.

        Args:
            source: A directory of safetensors or a hub id; a dict of Hugging Face names, or an
                iterator of (name, array) with such names, to NumPy, JAX or torch arrays; an
                `nnx.State` or a dict by nnx path; a list of leaves in the model's order; a Flax
                parameter tree in MLLM-JAX's layout. Floats are cast to the engine's dtype. JAX
                arrays may lie on any devices of this host. One that has the model's layout and
                dtype, with its bytes on an engine's device, is shared with that engine: deleting
                or donating it takes the engine's weights away, unless `copy=True`.
            weight_version: What results carry from now on; left out, the number of the update.
            mode: What becomes of running requests. "drain": they finish first, on the old
                weights; refused while a pause keeps some that have begun from finishing.
                "retract": they go back to the queue with the tokens that they have and go on
                under the new weights, their KV computed anew. "abort": they end with what they
                have. "in_place": they go on under the new weights with the KV they have.
                Waiting requests wait, in every mode.
            strategy: "atomic": all engines at once. "rolling": one after the other while the
                others serve, each output from one version ("drain" and "abort" only).
            staging: "double" holds both sets for a while, so that engines stand for a moment
                only. "stream" replaces leaf by leaf while engines stand, at one set and a leaf.
                "auto": "double" where it fits.
            strict: Every weight must be there and nothing else, and a directory's config.json must
                be of the same model; False updates what is there.
            free_kv: Give the KV cache's memory back meanwhile; engines stand all the time.

        Raises:
            InvalidWeights: The source does not fit; nothing was touched. From an iterator, which
                cannot be read ahead, the same holds with staging="double".
            WeightUpdateFailed: A device failed; all serving engines have one version.
            InvalidRequest: Options that do not exist or do not go together.
            PoolClosed, PoolFailed: As everywhere.
        """
        options = Options(
            weight_version, mode, strategy, staging, strict=strict, copy=copy, free_kv=free_kv
        )
        return update.update_weights(self._runtime(), source, options)

    def stage_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        strict: bool = True,
        copy: bool = False,
        expires_after: float | None = 300.0,
    ) -> StagedWeights:
        """Put new weights on every device beside those that serve, to be committed later: the
        first half of `update_weights`, for who must know that all hosts have them. Meanwhile
        everything goes on, recovery and other updates too.

        A pool holds one staged set; another set, or an update, discards it.

        Args:
            expires_after: Seconds until they are discarded; None for no limit.
            source, weight_version, strict, copy: As `update_weights`.

        Raises:
            InvalidWeights, WeightUpdateFailed, PoolClosed, PoolFailed: As `update_weights`.
        """
        expires_after = seconds("expires_after", expires_after)
        options = Options(weight_version, strict=strict, copy=copy)
        return stage_weights(self._runtime(), source, options, expires_after)

    def release_weights(self) -> int:
        """Give the weights' memory back; returns the bytes. Running requests go back to the queue
        and go on after the next `update_weights`; until then new calls raise `NoWeights`."""
        return memory_occupation.release_weights(self._runtime())

    def release_memory_occupation(self, tags: Sequence[str] = ("kv_cache",)) -> int:
        """Give the KV caches' memory back; returns the bytes. Running requests go back to the
        queue; they and new ones wait for `resume_memory_occupation`."""
        return memory_occupation.release_kv_cache(self._runtime(), tags)

    def resume_memory_occupation(self) -> int:
        """Make the KV caches again, without a compilation; returns the bytes."""
        return memory_occupation.resume_kv_cache(self._runtime())

    def checksum(self) -> str:
        """16 hexadecimal digits over all weights, computed on the devices.

        Raises:
            EnginesDiffer: Engines have different weights.
            NoWeights: An engine has none.
        """
        return weight_inspection.checksum(self._runtime())

    def quick_checksum(self) -> float:
        """The sum of the first 1,024 elements of each of the first four leaves, in float32.

        Raises what `checksum` raises.
        """
        return weight_inspection.quick_checksum(self._runtime())

    def perturb_weights(
        self, seed: int = 0, scale: float = 1e-3, num_leaves: int = 1
    ) -> SwapReport:
        """Add normal noise to the first `num_leaves` leaves, the same on every engine."""
        return self.update_weights(
            weight_inspection.noise(self._runtime(), seed, scale, num_leaves), strict=False
        )

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor in float32, by its Hugging Face name and in that layout, or
        by the model's leaf path."""
        return weight_inspection.by_name(self._runtime(), name, truncate_size)

    # Async twins: the same without blocking the event loop. Cancelling does not stop what runs.

    async def async_update_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        mode: SwapMode = "drain",
        strategy: Strategy = "atomic",
        staging: Staging = "auto",
        strict: bool = True,
        copy: bool = False,
        free_kv: bool = False,
    ) -> SwapReport:
        """`update_weights` without blocking the event loop; cancelling does not stop it."""
        options = Options(
            weight_version, mode, strategy, staging, strict=strict, copy=copy, free_kv=free_kv
        )
        return await anyio.to_thread.run_sync(
            lambda: update.update_weights(self._runtime(), source, options)
        )

    async def async_stage_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        strict: bool = True,
        copy: bool = False,
        expires_after: float | None = 300.0,
    ) -> StagedWeights:
        """`stage_weights` without blocking the event loop; cancelling does not stop it."""
        return await anyio.to_thread.run_sync(
            lambda: self.stage_weights(
                source,
                weight_version=weight_version,
                strict=strict,
                copy=copy,
                expires_after=expires_after,
            )
        )

    async def async_release_weights(self) -> int:
        """`release_weights` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.release_weights)

    async def async_release_memory_occupation(self, tags: Sequence[str] = ("kv_cache",)) -> int:
        """`release_memory_occupation` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.release_memory_occupation, tags)

    async def async_resume_memory_occupation(self) -> int:
        """`resume_memory_occupation` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.resume_memory_occupation)

    async def async_checksum(self) -> str:
        """`checksum` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.checksum)

    async def async_quick_checksum(self) -> float:
        """`quick_checksum` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.quick_checksum)

    async def async_perturb_weights(
        self, seed: int = 0, scale: float = 1e-3, num_leaves: int = 1
    ) -> SwapReport:
        """`perturb_weights` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.perturb_weights, seed, scale, num_leaves)

    async def async_get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """`get_weights_by_name` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.get_weights_by_name, name, truncate_size)
