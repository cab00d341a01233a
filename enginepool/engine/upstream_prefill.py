"""The prefill program of an engine whose steps are upstream's own.

Reaches into upstream's model runner and compilation manager. Upstream makes the extend batch, and
its model runs the forward. `ScoreHead` wraps the model's logits processor. The program replaces
upstream's prefill program. Otherwise both would be compiled for every bucket.

What breaks: See `prefill_program.py`.
Why: See there.
Remove when: See there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.common_programs import OnAnyDevice, WithoutDevices
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.prefill_program import PrefillPiece, PrefillProgram
from enginepool.engine.routed_experts import routing_of, stacked
from enginepool.engine.score_head import ScoreHead, Scores
from enginepool.errors import InvalidConfig
from enginepool.lora.layers import on_batch

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
    from sgl_jax.srt.managers.tp_worker import ModelWorker


class UpstreamPrefill(PrefillProgram):
    """The program of an engine whose steps are upstream's own: upstream samples after it."""

    def __init__(
        self,
        worker: ModelWorker,
        adapters: AdapterSlots | None = None,
        experts: np.dtype | None = None,
    ) -> None:
        """
        Args:
            experts: The type of the experts' numbers, if prefill steps return these.
        """
        super().__init__(worker)
        runner = self._runner
        self._manager = worker.compilation_manager
        self._templates: dict[int, ModelWorkerBatch] = {}
        programs = common_programs()
        self._definition, state = programs.split(runner.model)
        self._structure = jax.tree.structure(state)
        sizes = runner.model_config.vocab_size, self.sequences, experts
        self._program = programs.common(["upstream's prefill", *sizes], lambda: _program(*sizes))
        self._experts, self._adapters = experts, adapters
        self._original = runner.jitted_run_model
        if self.refusal is None:
            runner.jitted_run_model = self._prefill

    def routing(self) -> Routing:
        """How the model routes.

        Raises:
            InvalidConfig: The routing cannot be determined.
        """
        if self.refusal is not None:
            raise InvalidConfig(f"enable_return_routed_experts=True: {self.refusal}")
        assert self._experts is not None
        runner = self._runner
        given = self._program_arguments(*self._arguments(self.buckets[0], []))
        program = OnAnyDevice(jax.jit(_layers_of_experts, static_argnames=["structure"]))
        with jax.set_mesh(runner.mesh):
            layers = program.eval_shape(*given)
        return routing_of(layers, self._experts, runner.model_config.hf_config)

    def _run(self, bucket: int, pieces: Sequence[PrefillPiece], *, top: bool) -> Scores:
        runner = self._runner
        forward_batch, metadata = self._arguments(bucket, pieces)
        wanted = self._wanted(bucket, pieces, top)
        runner.jitted_run_model = partial(self._run_program, wanted)
        try:
            _, scores = runner.forward(forward_batch, metadata)[0]
        finally:
            runner.jitted_run_model = self._prefill
        return scores

    def _prefill(self, forward_batch: ForwardBatch, metadata: LogitsMetadata) -> Any:
        """Called by `ModelRunner.forward` instead of upstream's program. Upstream's still runs
        all other steps."""
        if forward_batch.forward_mode != ForwardMode.EXTEND:
            return self._original(forward_batch, metadata)
        nothing = self._nothing[len(forward_batch.input_ids)]
        (output, _), *others = self._run_program(nothing, forward_batch, metadata)
        return output, *others

    def _run_program(
        self, wanted: jax.Array | None, forward_batch: ForwardBatch, metadata: LogitsMetadata
    ) -> Any:
        return self._program(*self._program_arguments(forward_batch, metadata), wanted)

    def _program_arguments(
        self, forward_batch: ForwardBatch, metadata: LogitsMetadata
    ) -> tuple[Any, ...]:
        runner, batch = self._runner, forward_batch
        backend: Any = WithoutDevices(batch.attn_backend)
        batch.attn_backend = backend
        pools = WithoutDevices(runner.memory_pools)
        leaves = runner.model_state_leaves
        return self._definition, self._structure, leaves, batch, pools, metadata

    def _arguments(
        self, bucket: int, pieces: Sequence[PrefillPiece]
    ) -> tuple[ForwardBatch, LogitsMetadata]:
        """What `ModelRunner.forward` takes."""
        batch, runner = self._batch(bucket, pieces), self._runner
        forward_batch = ForwardBatch.init_new(batch, runner)
        runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
        return forward_batch, LogitsMetadata.from_model_worker_batch(batch, runner.mesh)

    def _batch(self, bucket: int, pieces: Sequence[PrefillPiece]) -> ModelWorkerBatch:
        """An extend batch of upstream's, padded as upstream pads."""
        if bucket not in self._templates:
            self._templates[bucket] = self._manager._make_dummy_batch(
                self.sequences,
                bucket,
                ForwardMode.EXTEND,
                self.slots,
                dp_size=1,
                per_dp_bs_size=self.sequences,
            )
        batch = copy.copy(self._templates[bucket])
        lengths = [len(piece.ids) for piece in pieces]
        prefixes = [piece.prefix for piece in pieces]
        ends = list(map(sum, zip(prefixes, lengths, strict=True)))
        batch.real_bs, batch.real_input_ids_len = len(pieces), sum(lengths)
        batch.input_ids = _padded(bucket, [piece.ids for piece in pieces])
        batch.positions = _padded(bucket, list(map(range, prefixes, ends)))
        written = [piece.slots[piece.prefix :][: len(piece.ids)] for piece in pieces]
        batch.out_cache_loc = _padded(bucket, written, fill=-1)
        batch.cache_loc = _padded(self.slots, [piece.slots for piece in pieces])
        batch.seq_lens = _padded(self.sequences, [ends])
        batch.extend_seq_lens = _padded(self.sequences, [lengths])
        batch.extend_prefix_lens = _padded(self.sequences, [prefixes])
        batch.logits_indices = np.zeros(self.sequences, np.int32)
        if self._adapters is not None:
            rows = [self._adapters.row(piece.adapter) for piece in pieces]
            self._adapters.fill(batch, rows, lengths)
        return batch


def _layers_of_experts(
    definition: nnx.GraphDef,
    structure: PyTreeDef,
    leaves: list[jax.Array],
    forward_batch: ForwardBatch,
    pools: Any,
    metadata: LogitsMetadata,
) -> Sequence[jax.Array | None]:
    """Inside a program: the experts of each layer, as the model returns them."""
    model = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
    *_, layers = model(forward_batch, pools, metadata)
    return layers


def _program(vocab_size: int, batch: int, experts: np.dtype | None) -> OnAnyDevice:
    head = partial(ScoreHead, vocab_size=vocab_size, batch=batch)

    # This function does not hold the runner. In a reference cycle the runner's arrays would outlive
    # a closed engine.
    @partial(jax.jit, donate_argnames=["memory_pools"], static_argnames=["structure"])
    def prefill(
        definition: nnx.GraphDef,
        structure: PyTreeDef,
        leaves: list[jax.Array],
        forward_batch: ForwardBatch,
        memory_pools: Any,
        logits_metadata: LogitsMetadata,
        wanted: jax.Array,
    ) -> Any:
        model = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
        # Set through `vars`: nnx would count the head's arrays as the model's.
        vars(model)["logits_processor"] = head(model.logits_processor, wanted)
        with on_batch(forward_batch):
            *others, layers = model(forward_batch, memory_pools, logits_metadata)
        return *others, layers if experts is None else stacked(layers, experts)

    return OnAnyDevice(prefill)


def _padded(length: int, parts: Sequence[Sequence[int] | np.ndarray], fill: int = 0) -> np.ndarray:
    """Concatenate the parts and pad them to a length."""
    array = np.full(length, fill, np.int32)
    end = 0
    for part in parts:
        array[end : end + len(part)] = part
        end += len(part)
    return array
