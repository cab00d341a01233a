"""The prefill program, which can compute log-probabilities of given tokens as well.

Reaches into upstream's model runner and compilation manager. `steady/prefill_step.py` implements it
for steady decode, `upstream_prefill.py` for upstream's steps.

What breaks: Upstream's own log-probabilities of prompts materialise the logits of all positions.
Those of a long prompt do not fit in memory. Upstream compiles new programs for them while the
engine serves, and cannot mix such requests with requests that do not ask for them.
Why: Upstream computes them in the same batch that samples.
Remove when: Upstream computes them a slice at a time, whatever else is in the batch.

Some models cannot be scored, such as one without a logits processor (`_refusal`). The error of the
call gives the reason.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.engine.score_head import Scores, pack_wanted
from enginepool.lora.adapter import Adapter
from enginepool.process.upstream import expect

if TYPE_CHECKING:
    from sgl_jax.srt.managers.tp_worker import ModelWorker
    from sgl_jax.srt.model_executor.compilation_manager import CompilationManager
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class PrefillPiece:
    """Some tokens of a prompt. The `prefix` tokens before them are in the KV cache already.

    Attributes:
        slots: The KV cache's slots for prefix and piece, in whole pages.
        targets: For each of the last tokens of the piece: the id that follows it.
        named: Ids whose log-probabilities are wanted beside each target's.
        adapter: The adapter that it is computed with, if any.
    """

    ids: list[int]
    prefix: int
    slots: np.ndarray
    targets: list[int]
    named: Sequence[int] = ()
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Values:
    """The results for one piece, one row per target. The values of the most probable tokens and of
    named tokens are None if no piece of the run asked for them."""

    logprobs: np.ndarray
    top_values: np.ndarray | None
    top_ids: np.ndarray | None
    named: np.ndarray | None


class PrefillProgram:
    """One program for each bucket of tokens, with the engine's own model and KV cache.

    Attributes:
        refusal: Why this engine cannot score, if it cannot.
        tokens, sequences, slots: The most that one run can take; slots count whole pages.
    """

    def __init__(self, worker: ModelWorker) -> None:
        expect(worker, "model_runner", "compilation_manager")
        runner: Any = worker.model_runner
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
        self._everywhere = NamedSharding(runner.mesh, PartitionSpec())
        self._nothing: dict[int, jax.Array | None] = dict.fromkeys(self.buckets)
        if self.refusal is None:
            self._nothing = {bucket: self._wanted(bucket, [], False) for bucket in self.buckets}

    def compile(self, next_bucket: Callable[[], None]) -> None:
        """Compile every program before the engine serves. Each run prefills one token, into page 1,
        the first that a request may have.

        Args:
            next_bucket: Called before each bucket.
        """
        page = self.page_size
        token = PrefillPiece([0], 0, np.arange(page, 2 * page), [0])
        for bucket in self.buckets if self.refusal is None else ():
            next_bucket()
            self._run(bucket, [token], top=False)

    def bucket(self, tokens: int) -> int:
        """The bucket for this many tokens."""
        return next(bucket for bucket in self.buckets if bucket >= tokens)

    def run(self, pieces: Sequence[PrefillPiece], *, top: bool) -> Scores:
        """Compute pieces together and fill their KV cache. `fetch` takes what this returns.

        Args:
            top: Whether any piece wants the most probable tokens.
        """
        return self._run(self.bucket(sum(len(piece.ids) for piece in pieces)), pieces, top=top)

    @staticmethod
    def fetch(pieces: Sequence[PrefillPiece], results: Scores, *, top: bool) -> list[Values]:
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

    @abstractmethod
    def _run(self, bucket: int, pieces: Sequence[PrefillPiece], *, top: bool) -> Scores:
        """Compute pieces in the program of this bucket."""

    def _wanted(self, bucket: int, pieces: Sequence[PrefillPiece], top: bool) -> jax.Array:
        """The argument of `ScoreHead`: which rows of the hidden states are scored, for which
        ids."""
        starts = itertools.accumulate((len(piece.ids) for piece in pieces), initial=0)
        rows = [
            range(start + len(piece.ids) - len(piece.targets), start + len(piece.ids))
            for start, piece in zip(starts, pieces, strict=False)
        ]
        names = np.zeros((self.sequences, MAX_NAMED_IDS), np.int32)
        for place, piece in enumerate(pieces):
            names[place, : len(piece.named)] = piece.named
        wanted = {
            "rows": list(itertools.chain.from_iterable(rows)),
            "targets": list(itertools.chain.from_iterable(piece.targets for piece in pieces)),
            "whose": [place for place, one in enumerate(rows) for _ in one],
            "names": names,
            "top": top,
            "named": any(piece.named for piece in pieces),
        }
        return jax.device_put(pack_wanted(bucket, wanted), self._everywhere)


def _refusal(runner: ModelRunner, manager: CompilationManager) -> str | None:
    name = type(runner.model).__name__
    if not hasattr(manager, "_make_dummy_batch"):
        return "this sglang-jax lacks CompilationManager._make_dummy_batch, which scoring needs"
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
