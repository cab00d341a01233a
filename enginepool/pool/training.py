"""The calls that trainers use: new weights, released memory, checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from enginepool.frontend.cancellation import async_twin
from enginepool.pool.calls import CallGroup
from enginepool.runtime import memory_occupation, update_weights, weight_inspection
from enginepool.runtime.forward_function import forward_function
from enginepool.runtime.noise import perturb_weights
from enginepool.runtime.quiesce import SwapMode
from enginepool.runtime.staged_weights import StagedWeights, stage_weights
from enginepool.runtime.swap_options import Options, Staging, Strategy
from enginepool.runtime.swap_report import SwapReport
from enginepool.values import seconds

if TYPE_CHECKING:
    import jax


class WeightCalls(CallGroup):
    """Mixin of `EnginePool`: the calls that change or read weights and memory. Thread-safe.

    Calls that change something run one at a time.
    """

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
        """Put new weights on all engines. If anything is wrong, no engine changes.

        Args:
            source: One of: a directory of safetensors or a hub id; a dict from Hugging Face names
                to NumPy, JAX or torch arrays, or an iterator of such (name, array) pairs; an
                `nnx.State` or a dict by nnx path; a list of leaves in the model's order; a Flax
                parameter tree in MLLM-JAX's layout. Floats are cast to the engine's dtype. JAX
                arrays may lie on any devices of this host. An engine shares an array that has the
                model's layout and dtype and lies on its device: if the owner deletes or donates
                that array, the engine has no weights. `copy=True` prevents it.
            weight_version: The label that results carry from now on. None: the update's number.
            mode: What happens to requests that have begun. All others wait in the queue, in every
                mode. "drain": they finish first, on the old weights. It is refused if a pause keeps
                one of them from finishing. "retract": they go back to the queue with the tokens
                that they have and continue on the new weights; their KV is recomputed. "abort":
                they end with the tokens that they have. "in_place": they continue on the new
                weights, with the KV of the old weights.
            strategy: "atomic": all engines change at once. "rolling": one engine after the other
                changes while the others serve, and every output has one version ("drain" and
                "abort" only).
            staging: "double" keeps the old and the new weight set in memory for a while; engines
                stop for a moment only. "stream" replaces leaf by leaf while engines are stopped; it
                needs memory for one set and one leaf. "auto" is "double" if two sets fit.
            strict: True: the source must have every weight and no other, and a directory's
                config.json must be of the same model. False: update only the weights that the
                source has.
            copy: Share no array with the source.
            free_kv: Release the KV cache's memory during the update. Engines are stopped during the
                whole update.

        Raises:
            InvalidWeights: The source does not fit. No engine has changed. For an iterator this
                holds with staging="double" only, because it cannot be read ahead.
            WeightUpdateFailed: A device failed. All engines that serve have the same version.
            InvalidRequest: An option does not exist, or two options contradict each other.
            PoolClosed, PoolFailed: As `generate_all`.
        """
        options = Options(
            weight_version, mode, strategy, staging, strict=strict, copy=copy, free_kv=free_kv
        )
        return update_weights.update_weights(self.runtime, source, options)

    def stage_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        strict: bool = True,
        copy: bool = False,
        expires_after: float | None = 300.0,
    ) -> StagedWeights:
        """Put new weights on every device beside the current ones, to commit them later.

        This is the first half of `update_weights`. It is for a program that commits only when all
        hosts have the weights. Engines serve, recover and take other updates meanwhile. A pool
        holds one staged set: another set, or an update, discards it.

        Args:
            expires_after: Seconds until the staged set is discarded; None for no limit.
            source, weight_version, strict, copy: As `update_weights`.

        Raises:
            InvalidWeights, WeightUpdateFailed, PoolClosed, PoolFailed: As `update_weights`.
        """
        expires_after = seconds("expires_after", expires_after)
        options = Options(weight_version, strict=strict, copy=copy)
        return stage_weights(self.runtime, source, options, expires_after)

    def release_weights(self) -> int:
        """Release the weights' memory. Returns the bytes.

        Running requests go back to the queue and continue after the next `update_weights`. Until
        then new calls raise `NoWeights`.
        """
        return memory_occupation.release_weights(self.runtime)

    def release_memory_occupation(self, tags: Sequence[str] = ("kv_cache",)) -> int:
        """Release the KV caches' memory. Returns the bytes.

        Running requests go back to the queue. They and new requests wait for
        `resume_memory_occupation`. `tags` is sglang's, and accepts its default only.
        """
        return memory_occupation.release_kv_cache(self.runtime, tags)

    def resume_memory_occupation(self) -> int:
        """Allocate the KV caches again, without a compilation. Returns the bytes."""
        return memory_occupation.resume_kv_cache(self.runtime)

    def checksum(self) -> str:
        """A checksum of all weights in 16 hexadecimal digits, computed on the devices.

        Raises:
            EnginesDiffer: Engines have different weights.
            NoWeights: An engine has none.
            WeightUpdateFailed: All engines have failed and will come back.
        """
        return weight_inspection.checksum(self.runtime)

    def quick_checksum(self) -> float:
        """The sum of the first 1,024 elements of each of the first four leaves, in float32.

        Raises what `checksum` raises.
        """
        return weight_inspection.quick_checksum(self.runtime)

    def perturb_weights(
        self, seed: int = 0, scale: float = 1e-3, num_leaves: int = 1
    ) -> SwapReport:
        """Add normal noise to the first `num_leaves` leaves. Every engine gets the same noise."""
        return perturb_weights(self.runtime, seed, scale, num_leaves)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, in float32.

        Args:
            name: A Hugging Face name gives the tensor in Hugging Face layout. A leaf path of the
                model gives the leaf.
        """
        return weight_inspection.by_name(self.runtime, name, truncate_size)

    def forward_function(self) -> Callable[..., jax.Array]:
        """The engines' forward, as a function for a trainer.

        `forward(params, input_ids, mask=None)` returns the logits of the next token at every
        position, [B, T, V]. `params` are parameters by Hugging Face name, as `update_weights` takes
        them, of any float dtype. `input_ids` is [B, T] int32. `mask` is true at a row's tokens,
        which are contiguous. Without a mask, padding is on the right. The values are those of
        `score` with these parameters, in the engines' dtype. JAX can differentiate the function,
        and compile it in other functions. It needs no open pool.

        The parameters lie on one device. Attention is computed in plain JAX, and its memory grows
        with the square of T. On a TPU the engines use an attention kernel, so the values differ
        more there.

        Raises:
            InvalidConfig: An engine has several devices, adapters or quantized weights, or JAX
                cannot differentiate this model. The function itself raises `InvalidWeights` for
                parameters that do not fit.
        """
        return forward_function(self.runtime)

    # Async twins

    async_forward_function = async_twin(forward_function)
    async_update_weights = async_twin(update_weights)
    async_stage_weights = async_twin(stage_weights)
    async_release_weights = async_twin(release_weights)
    async_release_memory_occupation = async_twin(release_memory_occupation)
    async_resume_memory_occupation = async_twin(resume_memory_occupation)
    async_checksum = async_twin(checksum)
    async_quick_checksum = async_twin(quick_checksum)
    async_perturb_weights = async_twin(perturb_weights)
    async_get_weights_by_name = async_twin(get_weights_by_name)
