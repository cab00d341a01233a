"""The prefill program of every request. It can compute log-probabilities of given tokens as well.

Reaches into upstream's model runner and compilation manager: the model's own forward pass runs over
an extend batch of upstream's making, with a head of ours around its logits processor. It replaces
upstream's prefill program, which would otherwise be compiled beside it for every bucket.

What breaks: Upstream's own log-probabilities of prompts materialise the logits of all positions,
which a long prompt has no memory for, compile anew while it serves, and cannot be mixed with
requests that do not ask for them.
Why: They are part of the batch that samples.
Remove when: Upstream computes them a slice at a time, whatever else is in the batch. A model
without a logits processor is not scored, nor is one for which upstream makes no extend batch; the
call says which.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.common_programs import OnAnyDevice, WithoutDevices
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.routed_experts import routing_of, stacked
from enginepool.engine.score_head import ScoreHead
from enginepool.errors import InvalidConfig
from enginepool.lora.adapter import Adapter
from enginepool.lora.layers import on_batch
from enginepool.process.upstream import expect

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
    from sgl_jax.srt.managers.tp_worker import ModelWorker
    from sgl_jax.srt.model_executor.compilation_manager import CompilationManager
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class PrefillPiece:
    """Some tokens of a prompt. The `prefix` tokens before them are in the KV cache already.

    Attributes:
        slots: The KV cache's slots for prefix and piece, in whole pages.
        targets: The ids that follow the last tokens of the piece, one each.
        named: Ids whose log-probabilities are wanted beside each target's.
        adapter: That it is computed with, if any.
    """

    ids: list[int]
    prefix: int
    slots: np.ndarray
    targets: list[int]
    named: Sequence[int] = ()
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Values:
    """The results for one piece, one row a target. The most probable tokens and named ones are
    there only if they were asked for."""

    logprobs: np.ndarray
    top_values: np.ndarray | None
    top_ids: np.ndarray | None
    named: np.ndarray | None


class PrefillProgram:
    """One program for each bucket of tokens, with the engine's own model and KV cache. Upstream's
    prefill steps run it too, unless there is a `refusal`.

    Attributes:
        refusal: Why this engine cannot score, if it cannot.
        tokens, sequences, slots: The most that one run can take; slots count whole pages.
    """

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
        expect(worker, "model_runner", "compilation_manager")
        runner: Any = worker.model_runner  # its function is replaced
        manager = worker.compilation_manager
        expect(manager, "token_buckets", "cache_loc_buckets", "page_size")
        expect(runner, "jitted_run_model", "attn_backend", "forward", "model_state_leaves")
        self.page_size: int = manager.page_size
        self.buckets = list(manager.token_buckets)
        self.tokens: int = self.buckets[-1]
        self.sequences: int = manager.max_padded_batch_size
        self.slots: int = manager.cache_loc_buckets[-1]
        self.refusal = _refusal(runner, manager)
        self._runner: Any = runner
        self._adapters = adapters
        self._manager = manager
        self._templates: dict[int, ModelWorkerBatch] = {}
        programs = common_programs()
        self._definition, state = programs.split(runner.model)
        self._structure = jax.tree.structure(state)
        sizes = runner.model_config.vocab_size, self.sequences, experts
        self._program = programs.common(["prefill", *sizes], lambda: _program(*sizes))
        self._experts = experts
        self._upstreams = runner.jitted_run_model
        if self.refusal is None:
            self._nothing = {bucket: self._wanted(bucket, [], False) for bucket in self.buckets}
            runner.jitted_run_model = self._prefill

    def routing(self) -> Routing:
        """How the model routes.

        Raises:
            InvalidConfig: That cannot be known.
        """
        if self.refusal is not None:
            raise InvalidConfig(f"enable_return_routed_experts=True: {self.refusal}")
        assert self._experts is not None
        batch = self._batch(self.buckets[0], [])
        runner = self._runner
        forward_batch = ForwardBatch.init_new(batch, runner)
        runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
        backend: Any = WithoutDevices(forward_batch.attn_backend)
        forward_batch.attn_backend = backend
        metadata = LogitsMetadata.from_model_worker_batch(batch, runner.mesh)
        program = OnAnyDevice(jax.jit(_layers_of_experts, static_argnames=["structure"]))
        with jax.set_mesh(runner.mesh):
            layers = program.eval_shape(
                self._definition,
                self._structure,
                runner.model_state_leaves,
                forward_batch,
                WithoutDevices(runner.memory_pools),
                metadata,
            )
        return routing_of(layers, self._experts, runner.model_config.hf_config)

    def compile(self) -> None:
        """Compile every program, before the engine serves: prefill one token, into the KV cache's
        first page."""
        page = self.page_size
        token = PrefillPiece([0], 0, np.arange(page, 2 * page), [0])
        for bucket in self.buckets if self.refusal is None else ():
            self._run(bucket, [token], top=False)

    def run(self, pieces: Sequence[PrefillPiece], *, top: bool) -> Any:
        """Compute pieces together and fill their KV cache. `fetch` takes what this returns.

        Args:
            top: Whether any piece wants the most probable tokens.
        """
        tokens = sum(len(piece.ids) for piece in pieces)
        bucket = next(bucket for bucket in self.buckets if bucket >= tokens)
        return self._run(bucket, pieces, top=top)

    @staticmethod
    def fetch(pieces: Sequence[PrefillPiece], results: Any, *, top: bool) -> list[Values]:
        """Fetch what `run` has computed for each piece."""
        wanted = True, top, top, any(piece.named for piece in pieces)
        logprobs, *others = jax.device_get(
            [array if needed else None for array, needed in zip(results, wanted, strict=True)]
        )
        ends = list(itertools.accumulate(len(piece.targets) for piece in pieces))
        parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return [
            Values(logprobs[part], *(None if array is None else array[part] for array in others))
            for part in parts
        ]

    def _run(self, bucket: int, pieces: Sequence[PrefillPiece], *, top: bool) -> Any:
        runner = self._runner
        batch = self._batch(bucket, pieces)
        forward_batch = ForwardBatch.init_new(batch, runner)
        runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
        metadata = LogitsMetadata.from_model_worker_batch(batch, runner.mesh)
        wanted = self._wanted(bucket, pieces, top)
        runner.jitted_run_model = partial(self._instead, wanted)
        try:
            _, scores = runner.forward(forward_batch, metadata)[0]
        finally:
            runner.jitted_run_model = self._prefill
        return scores

    def _prefill(self, forward_batch: ForwardBatch, metadata: LogitsMetadata) -> Any:
        """Called by `ModelRunner.forward` instead of upstream's program. Upstream's still runs
        what is no prefill."""
        if forward_batch.forward_mode != ForwardMode.EXTEND:
            return self._upstreams(forward_batch, metadata)
        nothing = self._nothing[len(forward_batch.input_ids)]
        (output, _), *others = self._instead(nothing, forward_batch, metadata)
        return output, *others

    def _instead(self, wanted: Any, forward_batch: ForwardBatch, metadata: LogitsMetadata) -> Any:
        runner = self._runner
        backend: Any = WithoutDevices(forward_batch.attn_backend)
        forward_batch.attn_backend = backend
        return self._program(
            self._definition,
            self._structure,
            runner.model_state_leaves,
            forward_batch,
            WithoutDevices(runner.memory_pools),
            metadata,
            wanted,
        )

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

    def _wanted(
        self, bucket: int, pieces: Sequence[PrefillPiece], top: bool
    ) -> dict[str, jax.Array]:
        """The arguments of `ScoreHead`: which rows of the hidden states are scored, for which
        ids."""
        starts = itertools.accumulate((len(piece.ids) for piece in pieces), initial=0)
        rows = [
            range(start + len(piece.ids) - len(piece.targets), start + len(piece.ids))
            for start, piece in zip(starts, pieces, strict=False)
        ]
        names = np.zeros((self.sequences, MAX_NAMED_IDS), np.int32)
        for place, piece in enumerate(pieces):
            names[place, : len(piece.named)] = piece.named
        whole = {
            "rows": _padded(bucket, rows),
            "targets": _padded(bucket, [piece.targets for piece in pieces]),
            "whose": _padded(bucket, [[place] * len(one) for place, one in enumerate(rows)]),
            "names": names,
            "count": np.int32(sum(map(len, rows))),
            "top": np.bool_(top),
            "named": np.bool_(any(piece.named for piece in pieces)),
        }
        return jax.device_put(whole, NamedSharding(self._runner.mesh, PartitionSpec()))


def _layers_of_experts(
    definition: Any, structure: Any, leaves: Any, forward_batch: Any, pools: Any, metadata: Any
) -> Any:
    """Inside a program: the experts of each layer, as the model returns them."""
    model = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
    *_, layers = model(forward_batch, pools, metadata)
    return layers


def _program(vocab_size: int, batch: int, experts: np.dtype | None) -> OnAnyDevice:
    head = partial(ScoreHead, vocab_size=vocab_size, batch=batch)

    # Without the runner: in a cycle its arrays would outlive a closed engine.
    @partial(jax.jit, donate_argnames=["memory_pools"], static_argnames=["structure"])
    def prefill(
        definition: Any,
        structure: Any,
        leaves: Any,
        forward_batch: ForwardBatch,
        memory_pools: Any,
        logits_metadata: LogitsMetadata,
        wanted: Any,
    ) -> Any:
        model = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
        # The module itself counts its arrays; this is none of them.
        vars(model)["logits_processor"] = head(model.logits_processor, wanted)
        with on_batch(forward_batch):
            *others, layers = model(forward_batch, memory_pools, logits_metadata)
        return *others, layers if experts is None else stacked(layers, experts)

    return OnAnyDevice(prefill)


def _padded(length: int, parts: Sequence[Any], fill: int = 0) -> np.ndarray:
    """Concatenate the parts and pad them to a length."""
    array = np.full(length, fill, np.int32)
    end = 0
    for part in parts:
        array[end : end + len(part)] = part
        end += len(part)
    return array


def _refusal(runner: ModelRunner, manager: CompilationManager) -> str | None:
    name = type(runner.model).__name__
    if not hasattr(manager, "_make_dummy_batch"):
        return "this sglang-jax has no CompilationManager._make_dummy_batch, which it is made of"
    if hasattr(runner.attn_backend, "prepare_model_state"):
        return "this sglang-jax's attention changes the weights that a program gets"
    if getattr(manager, "has_recurrent_state", False):
        return f"{name} keeps recurrent state beside its KV cache"
    if manager.token_buckets[-1] < manager.page_size:  # pieces are whole pages
        return f"a prefill of {manager.token_buckets[-1]} tokens is less than a page of KV cache"
    processor = getattr(runner.model, "logits_processor", None)
    if not all(hasattr(processor, part) for part in ("_get_logits", "_select_hidden_states")):
        return f"{name} has no logits processor that the pool knows"
    return None
