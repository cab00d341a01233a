"""Log-probabilities of the most probable tokens and of named tokens, and the ids that a token was
sampled from, in upstream's own steps. Other steps do this in `steady/sample.py`.

Reaches into upstream's model runner: its `compute_logprobs` is replaced.

What breaks: Upstream compiles a program for every arrangement of widths in a batch, while it
serves. Its results are misaligned if only some requests ask for them.
Why: The widths of a batch's requests are part of the program's shape.
Remove when: Upstream computes one width for all. If the signature differs, an error names it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from enginepool.dispatch.request import MAX_NAMED_IDS, MAX_TOP_LOGPROBS
from enginepool.dispatch.sampling_mask import MAX_KEPT_IDS
from enginepool.engine.common_programs import OnAnyDevice
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.sampling_mask import NEVER, find_kept, kept_of, no_kept
from enginepool.process.upstream import expect_parameters

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    from enginepool.dispatch.request import Request


class TopLogprobs:
    """Computes log-probabilities of a step's most probable ids and of named ids, and the ids that
    each token was sampled from. One program of fixed widths serves every batch."""

    def __init__(self, model_runner: ModelRunner) -> None:
        expect_parameters(model_runner.compute_logprobs, "logits", "token_ids")
        self._original = model_runner.compute_logprobs
        self._vocab_size: int = model_runner.model_config.vocab_size
        widths = min(MAX_TOP_LOGPROBS, self._vocab_size), min(MAX_KEPT_IDS, self._vocab_size)
        self._asking: list[tuple[int, Req, Request]] = []
        self._latest: tuple[Any, ...] | None = None
        self._warming = False
        self._replicated = NamedSharding(model_runner.mesh, PartitionSpec())
        mesh = model_runner.mesh.abstract_mesh
        self._top = common_programs().common(
            ["top", mesh, *widths], lambda: _program(mesh, *widths)
        )
        replaced: Any = model_runner
        replaced.compute_logprobs = self._compute

    def warm(self, warming: bool) -> None:
        """Set whether the program runs in every step, even if no request wants its values."""
        self._warming = warming
        self._latest = None  # nobody collects it

    def begin(self, batch: ScheduleBatch, held: dict[str, Request]) -> None:
        """Record which rows of the next step's batch want more values."""
        self._asking = self.asking(batch, held)

    @staticmethod
    def asking(batch: ScheduleBatch, held: dict[str, Request]) -> list[tuple[int, Req, Request]]:
        """The rows of a batch that want more values per token, and their requests."""
        reqs = [req for info in batch.reqs_info for req in info.reqs or ()]
        return [
            (row, req, request)
            for row, req in enumerate(reqs)
            if (request := held.get(req.rid)) is not None and request.wants_more
        ]

    def computed(self, values: tuple[np.ndarray | None, ...]) -> None:
        """Record the values of a step that another program has run. `collect` appends them."""
        self._latest = values

    def _compute(self, token_logprobs: jax.Array, token_ids: jax.Array) -> Any:
        self._latest = None
        if self._asking or self._warming:
            given = jax.device_put(self._wanted(len(token_logprobs)), self._replicated)
            self._latest = self._top(token_logprobs, token_ids, given)
        return self._original(token_logprobs, token_ids)

    def _wanted(self, rows: int) -> dict[str, Any]:
        asking = [request for *_, request in self._asking]
        wanted = {
            "top": np.bool_(any(request.top_logprobs_num for request in asking)),
            "kept": np.bool_(any(request.return_sampling_mask for request in asking)),
            "named": np.zeros((rows, MAX_NAMED_IDS), np.int32),
            "top_ks": np.ones(rows, np.int32),
            "top_ps": np.ones(rows, np.float32),
            "min_ps": np.zeros(rows, np.float32),
        }
        for row, req, request in self._asking:
            params = req.sampling_params
            wanted["named"][row, : len(request.named_ids)] = request.named_ids
            wanted["top_ks"][row], wanted["top_ps"][row] = params.top_k, params.top_p
            wanted["min_ps"][row] = params.min_p
        return wanted

    def collect(self, held: dict[str, Request]) -> None:
        """Append this step's values to each request that asked and is still here."""
        latest, self._latest = self._latest, None
        asking, self._asking = self._asking, []
        if latest is None:
            return
        values, ids, named, kept = jax.device_get(latest)
        for row, req, request in asking:
            if held.get(req.rid) is not request:
                continue
            count = len(req.output_ids)
            if (k := request.top_logprobs_num) and len(request.top_logprobs) < count:
                request.top_logprobs.append(top_values(values[row], ids[row], k))
            if (names := request.named_ids) and len(request.named_logprobs) < count:
                request.named_logprobs.append(named_values(named[row], len(names)))
            if request.return_sampling_mask and len(request.kept) < count:
                request.kept.append(kept_of(kept[row], self._vocab_size))


def top_values(values: np.ndarray, ids: np.ndarray, k: int) -> tuple[list[float], list[int]]:
    """The log-probabilities of the `k` most probable ids of one token, and these ids. Fewer, if a
    grammar allows fewer: ids that it forbids have float32's lowest value."""
    k = min(k, int((values > NEVER).sum()))
    return values[:k].tolist(), ids[:k].tolist()


def named_values(values: np.ndarray, count: int) -> list[float]:
    """The log-probabilities of the `count` ids that a request names, for one token."""
    own = values[:count]
    return np.where(own > NEVER, own, -np.inf).tolist()


def _program(mesh: AbstractMesh, width: int, kept_width: int) -> Any:
    table = NamedSharding(mesh, PartitionSpec(None, None))
    everywhere = NamedSharding(mesh, PartitionSpec(None))

    @jax.jit
    def top(logprobs: jax.Array, ids: jax.Array, wanted: dict[str, jax.Array]) -> Any:
        rows = len(logprobs)

        def best(logprobs: jax.Array) -> Any:
            return tuple(jax.lax.top_k(jax.sharding.reshard(logprobs, table), width))

        def none(_: jax.Array) -> Any:
            zeros = (jnp.zeros((rows, width), kind) for kind in (logprobs.dtype, jnp.int32))
            return tuple(jax.sharding.reshard(array, table) for array in zeros)

        def kept(logprobs: jax.Array) -> jax.Array:
            whole = jax.sharding.reshard(logprobs, table)
            own = jax.sharding.reshard(ids, everywhere)
            found = find_kept(whole, SimpleNamespace(**wanted), own, kept_width)
            return jax.sharding.reshard(found, table)

        def not_kept(_: jax.Array) -> jax.Array:
            return jax.sharding.reshard(no_kept(rows, kept_width), table)

        of_named = logprobs.at[jnp.arange(rows)[:, None], wanted["named"]].get(out_sharding=table)
        top_values, top_ids = jax.lax.cond(wanted["top"], best, none, logprobs)
        left = jax.lax.cond(wanted["kept"], kept, not_kept, logprobs)
        return top_values, top_ids, of_named, left

    return OnAnyDevice(top)
