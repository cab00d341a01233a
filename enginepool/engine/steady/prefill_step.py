"""A whole prefill as two programs. The first runs the forward (`extend.py`), and computes
log-probabilities of given tokens if they are wanted. The second samples the first tokens
(`sample.py`).

One program would be launched faster, by a few tens of microseconds. But sampling depends on no
bucket of tokens, and takes XLA as long to compile as a small model. So it is compiled once.

Reaches into upstream's model runner.

What breaks: A prefill of upstream's is three programs with sixteen arrays.
Why: See `program.py`.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

import patches
from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.common_programs import CommonPrograms, OnAnyDevice
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.prefill_program import PrefillPiece, PrefillProgram
from enginepool.engine.score_head import ScoreHead, Scores
from enginepool.engine.steady.device_batch import (
    FROM_TABLE,
    Features,
    RowTable,
    SentBatch,
    StepOutput,
)
from enginepool.engine.steady.extend import Extend, Prompts
from enginepool.engine.steady.packing import (
    adapters_of,
    pack,
    rest_of,
    state_and_origin,
    unpack,
)
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.sample import Sample, penalise_and_mask

if TYPE_CHECKING:
    from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
    from sgl_jax.srt.managers.scheduler import Scheduler


class SteadyPrograms(NamedTuple):
    """The programs of an engine that runs no step of upstream's."""

    decode: StepProgram
    prefill: PrefillStep


def steady_programs(
    scheduler: Scheduler,
    most_steps: int,
    adapters: AdapterSlots | None,
    routing: Routing | None,
) -> SteadyPrograms | None:
    """
    Args:
        most_steps: How many decode steps a launch can have.
        routing: How the model routes, if its experts are wanted.

    Returns:
        None if upstream runs all steps.
    """
    if not (patches.optimising() and supported(scheduler)):
        return None
    decode = StepProgram(scheduler, most_steps, adapters, routing)
    return SteadyPrograms(decode, PrefillStep(scheduler, decode, routing))


@dataclass
class HostPrompts:
    """The prompts of a prefill, on the host. See `extend.Prompts`.

    Attributes:
        table: A row samples its first token if it has an origin.
    """

    table: RowTable
    prefixes: np.ndarray
    pages: np.ndarray
    ids: np.ndarray


class PrefillStep(PrefillProgram):
    """The prefill program of an engine whose decode is steady. Used on the engine's thread."""

    def __init__(self, scheduler: Scheduler, program: StepProgram, routing: Routing | None) -> None:
        super().__init__(scheduler.tp_worker.worker)
        self._steps, self._sender = program, program.sender
        programs = common_programs()
        self._forward = _build_forward(
            Extend(self._runner, programs, routing),
            programs,
            rows=self.sequences,
            pages=self.slots // self.page_size,
            vocab_size=self._runner.model_config.vocab_size if self.refusal is None else None,
        )
        self._sample = _build_sample(
            self._runner.mesh.abstract_mesh,
            Sample(self._runner),
            programs,
            rows=self.sequences,
        )
        self._no_names, self._no_mask = self._sender.defaults(self.sequences)
        self.adapter_row = program.adapter_row

    @cached_property
    def _no_tallies(self) -> jax.Array:
        return self.tallies([], np.zeros((3, 0), np.int32))

    def tallies(self, rows: list[int], found: np.ndarray) -> jax.Array:
        """The tallies of a prefill. See `StepProgram.tally`."""
        empty = self._steps.begin(self._steps.empty(self.sequences).numbers)
        return self._steps.tally(empty, rows, found).tallies

    def prompts(self, tokens: int) -> HostPrompts:
        """Room for prompts of this many tokens in all. There are no prompts in it yet."""
        return HostPrompts(
            RowTable(self.sequences),
            np.zeros(self.sequences, np.int32),
            np.zeros(self.slots // self.page_size, np.int32),
            np.zeros(self.bucket(tokens), np.int32),
        )

    def send(
        self,
        prompts: HostPrompts,
        features: Features,
        names: np.ndarray | None = None,
        mask: np.ndarray | None = None,
    ) -> SentBatch:
        """Send prompts to the device."""
        place, parts = self._sender.place, (prompts.prefixes, prompts.pages, prompts.ids)
        return SentBatch(
            place(pack(features, prompts.table, *parts)),
            self._no_names if names is None else place(names),
            self._no_mask if mask is None else place(mask),
        )

    def launch(
        self, bucket: int, sent: SentBatch, tallies: jax.Array | None = None
    ) -> tuple[StepOutput, jax.Array | None]:
        """Launch a prefill.

        Args:
            tallies: The tallies of rows with penalties.

        Returns:
            The samples, or zeros if no row samples, and the experts of each id if they are wanted.
        """
        output, table, _, experts = self._launch_forward(bucket, sent)
        sampled = self._sample(
            output,
            self._no_tallies if tallies is None else tallies,
            sent._replace(numbers=table),
        )
        return sampled, experts

    def _launch_forward(
        self, bucket: int, sent: SentBatch, wanted: jax.Array | None = None
    ) -> tuple[LogitsProcessorOutput, jax.Array, Scores, jax.Array | None]:
        """
        Args:
            wanted: The argument of `ScoreHead`.

        Returns:
            The model's output, the numbers that the sampler reads, the scores, and the experts.
        """
        runner = self._runner
        *made, buffers = self._forward(
            runner.model_state_leaves,
            runner.token_to_kv_pool.kv_buffer,
            sent,
            self._nothing[bucket] if wanted is None else wanted,
        )
        runner.memory_pools.replace_all(buffers)
        output, table, scores, experts = made
        return output, table, scores, experts

    def compile(self, next_bucket: Callable[[], None]) -> None:
        """Compile every program before the engine serves. Each run prefills one token, into page 1,
        the first that a request may have.

        Args:
            next_bucket: Called before each bucket.
        """
        for bucket in self.buckets:
            next_bucket()
            prompts = self.prompts(bucket)
            prompts.table.state[1, 0] = prompts.pages[0] = 1
            self.launch(bucket, self.send(prompts, Features()))

    def _run(self, bucket: int, pieces: Sequence[PrefillPiece], *, top: bool) -> Scores:
        prompts = self.prompts(bucket)
        pages = [piece.slots[:: self.page_size] // self.page_size for piece in pieces]
        prompts.prefixes[: len(pieces)] = [piece.prefix for piece in pieces]
        prompts.table.state[1, : len(pieces)] = [piece.prefix + len(piece.ids) for piece in pieces]
        for row, piece in enumerate(pieces):
            prompts.table.set_adapter(row, *self.adapter_row(piece.adapter))
        for whole, parts in (
            (prompts.pages, pages),
            (prompts.ids, [piece.ids for piece in pieces]),
        ):
            joined = np.concatenate(parts)
            whole[: len(joined)] = joined
        wanted = self._wanted(bucket, pieces, top)
        _, _, scores, _ = self._launch_forward(bucket, self.send(prompts, Features()), wanted)
        return scores


def _build_forward(
    extend: Extend, programs: CommonPrograms, *, rows: int, pages: int, vocab_size: int | None
) -> OnAnyDevice:
    """Make the program that runs the model. It also returns the numbers of the batch that do not
    depend on the bucket.

    Args:
        vocab_size: None if nothing can be scored.
    """

    @partial(jax.jit, donate_argnames="kv")
    def prefill(
        leaves: list[jax.Array], kv: list[jax.Array], sent: SentBatch, wanted: jax.Array | None
    ) -> Any:
        numbers = sent.numbers
        rest = rest_of(numbers, rows)
        prefixes, listed, ids = jnp.split(rest, [rows, rows + pages])
        (_, lengths), _ = state_and_origin(numbers, rows)
        head = None
        if wanted is not None and vocab_size is not None:
            head = partial(ScoreHead, numbers=wanted, vocab_size=vocab_size, batch=rows)
        prompts = Prompts(lengths, prefixes, listed, ids, adapters_of(numbers, rows))
        output, kv, experts = extend(leaves, kv, prompts, head)
        output, scores = (output, None) if head is None else output
        return output, numbers[: -len(rest)], scores, experts, kv

    about = ["prefill", vars(extend), rows, pages, vocab_size]
    return programs.common(about, lambda: OnAnyDevice(prefill))


def _build_sample(
    mesh: AbstractMesh, sample: Sample, programs: CommonPrograms, *, rows: int
) -> OnAnyDevice:
    """Make the program that samples the first tokens."""

    @jax.jit
    def first_tokens(
        output: LogitsProcessorOutput,
        tallies: jax.Array,
        sent: SentBatch,
    ) -> StepOutput:
        batch = unpack(mesh, sent, rows, None)
        (_, lengths), origin = state_and_origin(sent.numbers, rows)
        logits = penalise_and_mask(output, batch, tallies, lengths)

        def sampled() -> StepOutput:
            return sample(logits, jnp.maximum(lengths - 1, 0), batch)[1]

        def nothing() -> StepOutput:
            return jax.tree.map(lambda array: array[0], sample.nothing(1, rows))

        return jax.lax.cond((origin == FROM_TABLE).any(), sampled, nothing)

    return programs.common(
        ["first tokens", mesh, vars(sample), rows], lambda: OnAnyDevice(first_tokens)
    )
