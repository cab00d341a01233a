"""The engine's forward as a function of a trainer's parameters, which JAX can differentiate.

Reaches into upstream's models and its native attention, whose KV cache is replaced.

What breaks: A trainer's own forward rounds differently from the engines' forward. In bfloat16 they
then disagree about the probability of every sampled token.
Why: Upstream's forward needs a KV cache, a batch of its scheduler, and leaves in its own layout.
Remove when: Upstream's models take whole sequences, without a KV cache.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

from enginepool.engine.executable_cache import common_programs
from enginepool.errors import InvalidConfig, InvalidWeights
from enginepool.process.upstream import expect

if TYPE_CHECKING:
    from enginepool.engine.scheduler import PinnedScheduler


class ExportedForward:
    """See `EnginePool.forward_function`. It holds no array and no device of its engine."""

    def __init__(self, scheduler: PinnedScheduler) -> None:
        """
        Raises:
            InvalidConfig: This engine's forward cannot be exported.
        """
        expect(NativeAttention, "_get_and_update_kv_cache")
        runner = scheduler.tp_worker.worker.model_runner
        leaves, mapping = scheduler.leaves, scheduler.hugging_face
        refusal = scheduler.prefill_program.refusal
        if len(leaves.devices) > 1:
            refusal = f"an engine has {len(leaves.devices)} devices; use tp_size=1"
        elif leaves.quantized:
            refusal = "the weights are quantized"
        elif leaves.adapter_specs:
            refusal = "the model has adapters; open the pool without enable_lora"
        if refusal is not None:
            raise InvalidConfig(f"forward_function is not possible in this pool: {refusal}")
        self._mesh = runner.mesh.abstract_mesh
        self._definition, state = common_programs().split(runner.model)
        self._tree = jax.tree.structure(state)
        self._leaves = []
        for path, spec in leaves.specs.items():
            names = mapping.names.get(path, ())
            shape = mapping.source_shape(path) if names else None
            tensors = {} if shape is None else {
                name: jax.ShapeDtypeStruct(shape, spec.dtype) for name in names
            }  # fmt: skip
            converter = mapping.converter(path, tensors) if tensors else None
            if converter is None:
                raise InvalidConfig(
                    "forward_function is not possible in this pool: no single program makes "
                    f"{path} from tensors with Hugging Face names"
                )
            self._leaves.append((tensors, converter))
        self._tensors = {name: one for tensors, _ in self._leaves for name, one in tensors.items()}
        self._program = jax.jit(self._logits)

    def probe(self) -> None:
        """Trace the forward and its gradient once.

        Raises:
            InvalidConfig: The model needs more than attention over one sequence, or JAX cannot
                differentiate it.
        """
        ids = np.zeros((1, 8), np.int32)

        def total(params: Mapping[str, jax.Array]) -> jax.Array:
            return self._program(params, ids, None).astype(jnp.float32).sum()

        try:
            jax.eval_shape(jax.grad(total), self._tensors)
        except Exception as error:
            raise InvalidConfig(
                "forward_function: JAX cannot compute or differentiate this model's forward on "
                f"whole sequences: {error!r}"
            ) from error

    def __call__(
        self,
        params: Mapping[str, ArrayLike],
        input_ids: ArrayLike,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """
        Args:
            params: The parameters by Hugging Face name, of any float dtype.
            input_ids: [B, T] int32.
            mask: [B, T], true at a row's tokens, which are contiguous. None: padding is on the
                right.

        Returns:
            Logits of the next token at every position, [B, T, V].

        Raises:
            InvalidWeights: Parameters are missing or have other shapes.
        """
        for name, spec in self._tensors.items():
            shape = jnp.shape(params[name]) if name in params else None
            if shape != spec.shape:
                got = "is missing" if shape is None else f"has shape {shape}"
                raise InvalidWeights(
                    f"forward_function: {name} {got}, expected shape {spec.shape}", names=[name]
                )
        given = {name: params[name] for name in self._tensors}
        return self._program(given, input_ids, mask)

    def _logits(
        self, params: Mapping[str, jax.Array], ids: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        made: list[jax.Array] = []
        for tensors, converter in self._leaves:
            made += converter(*[params[name].astype(spec.dtype) for name, spec in tensors.items()])
        # Attention is causal, so padding after a row's tokens changes nothing.
        first = jnp.zeros(len(ids), int) if mask is None else jnp.argmax(mask, axis=1)
        ids = jax.vmap(jnp.roll)(ids, -first)
        logits = jax.vmap(self._sequence, in_axes=(None, 0))(made, ids)
        logits = jax.sharding.reshard(logits, NamedSharding(self._mesh, PartitionSpec()))
        if logits.dtype == jnp.bfloat16:
            logits = jax.lax.reduce_precision(logits, 8, 7)  # as the engine's steps do
        return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))(logits, first)

    def _sequence(self, leaves: list[jax.Array], ids: jax.Array) -> jax.Array:
        """The logits of one sequence."""
        model = nnx.merge(self._definition, jax.tree.unflatten(self._tree, leaves))
        # Set through `vars`, as in `steady/forward.py`.
        vars(model)["logits_processor"] = _Logits(model.logits_processor)
        length = len(ids)
        positions, lengths = jnp.arange(length, dtype=jnp.int32), jnp.array([length], jnp.int32)
        zero = jnp.zeros(1, jnp.int32)
        with jax.sharding.use_abstract_mesh(self._mesh):
            batch = ForwardBatch(
                bid=0,
                forward_mode=ForwardMode.EXTEND,
                batch_size=1,
                input_ids=self._put(ids),
                req_pool_indices=self._put(zero),
                seq_lens=self._put(lengths),
                out_cache_loc=self._put(positions + 1),
                positions=self._put(positions),
                attn_backend=_Attention(0, 0, self._mesh),
                cache_loc=self._put(positions + 1),
                extend_prefix_lens=self._put(zero),
                extend_seq_lens=self._put(lengths),
                spec_algorithm=SpeculativeAlgorithm.NONE,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            wanted = LogitsMetadata(
                forward_mode=ForwardMode.EXTEND, capture_hidden_mode=CaptureHiddenMode.NULL
            )
            return model(batch, _NoCache, wanted)[0]

    def _put(self, array: jax.Array) -> jax.Array:
        return jax.sharding.reshard(array, NamedSharding(self._mesh, PartitionSpec("data")))


class _NoCache:
    """Replaces upstream's memory pools."""

    token_to_kv_pool = SimpleNamespace(page_size=1)


class _Logits:
    """Replaces a model's logits processor. Returns the logits of all positions."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, hidden_states: jax.Array, lm_head: Any, *_: Any, **__: Any) -> jax.Array:
        return self._processor._get_logits(hidden_states, lm_head)


class _Attention(NativeAttention):
    """Upstream's native attention without a KV cache: one sequence attends to itself."""

    def _get_and_update_kv_cache(self, k: Any, v: Any, *_: Any) -> Any:  # pyright: ignore
        # Slot 0 is padding to upstream.
        slots = [
            jnp.pad(jax.sharding.reshard(array, self.kv_sharding), ((1, 0), (0, 0), (0, 0)))
            for array in (k, v)
        ]
        return *slots, None
