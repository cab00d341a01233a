"""A whole prefill as one program. It runs the forward (`extend.py`), samples the first tokens
(`sample.py`), and computes log-probabilities of given tokens if they are wanted.

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
from enginepool.engine.steady.packing import pack, rest_of, state_and_origin, unpack
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.sample import Sample, penalise_and_mask

if TYPE_CHECKING:
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
        self._program = _build(
            Extend(self._runner, programs, routing),
            Sample(self._runner, programs),
            programs,
            rows=self.sequences,
            pages=self.slots // self.page_size,
            vocab_size=self._runner.model_config.vocab_size if self.refusal is None else None,
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
        self,
        bucket: int,
        sent: SentBatch,
        tallies: jax.Array | None = None,
        wanted: jax.Array | None = None,
    ) -> tuple[StepOutput, Scores, jax.Array | None]:
        """Launch a prefill.

        Args:
            tallies: The tallies of rows with penalties.
            wanted: The argument of `ScoreHead`.

        Returns:
            The samples, the scores, and the experts of each id if they are wanted.
        """
        runner = self._runner
        output, scores, experts, buffers = self._program(
            runner.model_state_leaves,
            self._steps.sampler,
            runner.token_to_kv_pool.kv_buffer,
            self._no_tallies if tallies is None else tallies,
            sent,
            self._nothing[bucket] if wanted is None else wanted,
        )
        runner.memory_pools.replace_all(buffers)
        return output, scores, experts

    def compile(self, next_bucket: Callable[[], None]) -> None:
        """Compile every program before the engine serves. Each run prefills one token, into the KV
        cache's first page.

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
        return self.launch(bucket, self.send(prompts, Features()), wanted=wanted)[1]


def _build(
    extend: Extend,
    sample: Sample,
    programs: CommonPrograms,
    *,
    rows: int,
    pages: int,
    vocab_size: int | None,
) -> Callable[..., Any]:
    """
    Args:
        vocab_size: None if nothing can be scored.
    """
    mesh = extend.mesh

    @partial(jax.jit, donate_argnames="kv")
    def prefill(
        leaves: list[jax.Array],
        sampler: list[jax.Array],
        kv: list[jax.Array],
        tallies: jax.Array,
        sent: SentBatch,
        wanted: jax.Array | None,
    ) -> Any:
        prefixes, listed, ids = jnp.split(rest_of(sent.numbers, rows), [rows, rows + pages])
        batch = unpack(mesh, sent, rows, None)
        (_, lengths), origin = state_and_origin(sent.numbers, rows)
        head = None
        if wanted is not None and vocab_size is not None:
            head = partial(ScoreHead, numbers=wanted, vocab_size=vocab_size, batch=rows)
        prompts = Prompts(lengths, prefixes, listed, ids, batch.adapters)
        output, kv, experts = extend(leaves, kv, prompts, head)
        output, scores = (output, None) if head is None else output
        logits = penalise_and_mask(output, batch, tallies, lengths)

        def sampled() -> StepOutput:
            return sample(sampler, logits, jnp.maximum(lengths - 1, 0), batch)[1]

        def nothing() -> StepOutput:
            return jax.tree.map(lambda array: array[0], sample.nothing(1, rows))

        output = jax.lax.cond((origin == FROM_TABLE).any(), sampled, nothing)
        return output, scores, experts, kv

    about = ["prefill", vars(extend), vars(sample), rows, pages, vocab_size]
    return programs.common(about, lambda: OnAnyDevice(prefill))
