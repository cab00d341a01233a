"""Steady decode samples as upstream's patched sampler, and skips filters that no row uses."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import patches
from enginepool.engine import sampling_mask
from enginepool.engine.sampling_mask import at_least, kept_of, least_kept
from enginepool.engine.steady.device_batch import SamplingColumns
from enginepool.engine.steady.sample import Sample
from patches._lookup import module

VOCAB = 640
# Temperature, top-k, top-p, min-p, by row.
GREEDY = [(1.0, 1, 1.0, 0.0), (0.4, 1, 1.0, 0.0)]
PLAIN = [(1.0, 1 << 30, 1.0, 0.0), (1.7, VOCAB, 1.0, 0.0)]
BY_K = [(3.0, 5, 1.0, 0.0), (0.6, 500, 1.0, 0.0)]
BY_P = [(1.0, 1 << 30, 0.6, 0.0), (2.5, 1 << 30, 0.95, 0.0)]
BY_MIN_P = [(1.0, 1 << 30, 1.0, 0.3), (2.0, 1 << 30, 1.0, 0.02)]
BY_ALL = [(1.5, 60, 0.8, 0.1), (0.8, 3, 0.5, 0.0)]
ROWS = [*GREEDY, *PLAIN, *BY_K, *BY_P, *BY_MIN_P, *BY_ALL]
# All of twelve rows, so that they share programs.
BATCHES = {
    "greedy": GREEDY * 6,
    "plain": PLAIN * 6,
    "greedy and plain": (GREEDY + PLAIN) * 3,
    "top-k": (PLAIN + BY_K) * 3,
    "top-p": (GREEDY + BY_P) * 3,
    "min-p": (PLAIN + BY_MIN_P) * 3,
    "all": ROWS,
}


def make_logits(rows: int) -> np.ndarray:
    """Logits with ties for the best, and with ids that a grammar forbids."""
    logits = np.random.default_rng(1).normal(0, 3, (rows, VOCAB)).astype(np.float32)
    logits[::3, 7] = logits[::3, 99] = 12
    logits[::2, 300:] = -np.inf
    return logits


def make_columns(rows: list[tuple[float, int, float, float]]) -> SamplingColumns:
    temperatures, top_ks, top_ps, min_ps = map(list, zip(*rows, strict=True))
    floats = [np.array(one, np.float32) for one in (temperatures, top_ps, min_ps)]
    seeds = np.arange(len(rows), dtype=np.int32) * 7919 - 3
    return SamplingColumns(floats[0][:, None], np.array(top_ks, np.int32), *floats[1:], seeds=seeds)


def filtered(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The ids that temperature, top-k, top-p and min-p leave, in this order, in float64."""
    p = np.exp(logits - logits.max())
    p = np.where(p >= np.sort(p)[-min(top_k, VOCAB)], p, 0) if top_k < VOCAB else p
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[before >= top_p]] = 0
    return (p > 0) & (p >= min_p * p.max())


@pytest.fixture(params=[1, 2], ids=["tp_size=1", "tp_size=2"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    devices = np.array(jax.devices()[: request.param]).reshape(1, -1)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture(autouse=True)
def patched() -> None:
    patches.apply()


@cache
def upstreams_program(mesh: Mesh) -> Callable[..., Any]:
    layers = module("sgl_jax.srt.layers.sampler")
    model = layers.Sampler(nnx.Rngs(0), mesh)

    @jax.jit
    def sample(logits: jax.Array, given: Any) -> Any:
        output = layers.LogitsProcessorOutput(next_token_logits=logits)
        return model(output, given, False, rng_override=jax.random.key_data(jax.random.key(0)))[:2]

    return sample


def upstreams(mesh: Mesh, logits: jax.Array, columns: SamplingColumns, positions: Any) -> Any:
    """The ids and the log-probabilities of upstream's sampler."""
    metadata = module("sgl_jax.srt.sampling.sampling_batch_info").SamplingMetadata

    def put(array: Any, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    given = metadata(
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
        temperatures=put(columns.temperatures, "data", None),
        top_ps=put(columns.top_ps, "data"),
        top_ks=put(columns.top_ks, "data"),
        min_ps=put(columns.min_ps, "data"),
        sampling_seeds=put(columns.seeds, "data"),
        positions=put(positions, "data"),
        is_all_greedy=bool((columns.top_ks <= 1).all()),
        need_min_p_sampling=bool((columns.min_ps > 0).any()),
        linear_penalty=put(np.zeros_like(logits), "data", "tensor"),
    )
    return upstreams_program(mesh)(put(logits, "data", "tensor"), given)


@cache
def program(mesh: Mesh) -> Callable[..., Any]:
    layers = module("sgl_jax.srt.layers.sampler")
    runner: Any = SimpleNamespace(mesh=mesh, model_config=SimpleNamespace(vocab_size=VOCAB))
    sample = Sample(runner)

    @jax.jit
    def run(logits: jax.Array, columns: Any, positions: Any, names: Any, flags: Any) -> Any:
        batch: Any = SimpleNamespace(
            sampling=columns, top=flags[0], named=flags[0], names=names, kept=flags[1]
        )
        return sample(layers.LogitsProcessorOutput(next_token_logits=logits), positions, batch)[1]

    return run


def sampled(
    mesh: Mesh, logits: jax.Array, columns: SamplingColumns, positions: Any, *, kept: bool
) -> Any:
    """What steady decode samples."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    columns, positions, names, flags = jax.device_put(
        (columns, positions, np.zeros((len(logits), 4), np.int32), np.array([True, kept])),
        everywhere,
    )
    logits = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    return program(mesh)(logits, columns, positions, names, flags)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_ids_and_logprobs_are_upstreams(mesh: Mesh, rows: list[Any], dtype: Any) -> None:
    """To the last bit, whatever other rows of the batch use. Two devices add up the probabilities
    in an order of their own. So their log-probabilities differ in the last bits."""
    logits = jnp.asarray(make_logits(len(rows))).astype(dtype)
    columns, positions = make_columns(rows), np.arange(len(rows), dtype=np.int32) * 3 + 1
    ids, law = upstreams(mesh, logits, columns, positions)
    found = sampled(mesh, logits, columns, positions, kept=False)
    own = np.asarray(law)[np.arange(len(rows)), np.asarray(ids)]
    assert np.asarray(found.ids[0]).tolist() == np.asarray(ids).tolist()
    logprobs = np.asarray(found.ids[1]).view(np.float32)
    np.testing.assert_allclose(logprobs, own, rtol=0, atol=0 if mesh.size == 1 else 1e-6)
    best = np.asarray(found.top[0])[:, 0]
    assert (np.asarray(logits)[np.arange(len(rows)), best] == np.asarray(logits).max(axis=1)).all()


def test_kept_ids_are_those_of_numpy(mesh: Mesh) -> None:
    """Each row's sampled id is among them. Greedy rows keep their id alone."""
    rows = ROWS * 4
    logits, columns = make_logits(len(rows)), make_columns(rows)
    found = sampled(mesh, jnp.asarray(logits), columns, np.zeros(len(rows), np.int32), kept=True)
    ids = np.asarray(found.ids[0])
    for row, (temperature, top_k, top_p, min_p) in enumerate(rows):
        kept = kept_of(np.asarray(found.kept[row]), VOCAB)
        left = filtered(logits[row].astype(float) / temperature, top_k, top_p, min_p)
        expected = np.flatnonzero(left) if top_k > 1 else ids[row : row + 1]
        assert ids[row] in expected
        assert kept.ids.tolist() == (expected.tolist() if len(expected) <= 512 else [])


@pytest.mark.parametrize(
    ("rows", "used"),
    [
        (GREEDY + PLAIN, []),
        (PLAIN + BY_MIN_P, []),
        (PLAIN + BY_K, ["topk_mask"]),
        (PLAIN + BY_P, ["topp_mask"]),
        (BY_K + BY_P, ["topk_mask", "topp_mask"]),
    ],
    ids=["none", "min-p", "top-k", "top-p", "both"],
)
def test_masks_that_no_row_uses_do_not_run(
    rows: list[Any], used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads the logits of all rows 32 times."""
    ran: list[str] = []

    def noticed(name: str, mask: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            jax.debug.callback(lambda: ran.append(name))
            return mask(*args)

        return run

    for name in ("topk_mask", "topp_mask"):
        monkeypatch.setattr(sampling_mask, name, noticed(name, getattr(sampling_mask, name)))
    columns = SamplingColumns(*map(jnp.asarray, make_columns(rows)))
    divided = jnp.asarray(make_logits(len(rows))) / columns.temperatures
    left = jax.jit(lambda one: at_least(one, least_kept(one, columns)))(divided)
    jax.effects_barrier()
    assert sorted(ran) == used
    for row, (_, top_k, top_p, min_p) in enumerate(rows):
        if top_k > 1:
            expected = filtered(np.asarray(divided[row], float), top_k, top_p, min_p)
            assert (np.asarray(left[row]) > -np.inf).tolist() == expected.tolist()
