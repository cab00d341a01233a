"""Draws of upstream's real sampler are compared with the law in NumPy, by chi-square."""

import functools

import numpy as np
import pytest
from scipy import stats

import patches
from patches import min_p, seeded_sampler, top_p_order

DRAWS = 20_000
PROBABILITIES = np.array([0.30, 0.25, 0.16, 0.11, 0.08, 0.05, 0.03, 0.02])
PATCHES = [seeded_sampler.PATCH, top_p_order.PATCH, min_p.PATCH]
CASES = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "temperature-top_k": {"temperature": 0.6, "top_k": 4},
    "temperature-top_p": {"temperature": 2.5, "top_p": 0.6},
    "temperature-min_p": {"temperature": 2.0, "min_p": 0.4},
    "top_k-top_p": {"top_k": 3, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.3},
}


def law(temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=0.0):
    """Return the probabilities of temperature, top-k, top-p, min-p, in this order."""
    p = PROBABILITIES ** (1 / temperature)
    p = np.where(np.arange(len(p)) < top_k, p / p.sum(), 0)  # in descending order
    p /= p.sum()
    p = np.where(np.cumsum(p) - p < top_p, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@functools.cache
def sampler(patched, seeded, sort=False, tensor=1):
    """Return upstream's Sampler, compiled with or without the patches."""
    import jax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from patches._lookup import module

    sampling = module("sgl_jax.srt.sampling.sampling_batch_info")
    layers = module("sgl_jax.srt.layers.sampler")
    devices = np.array(jax.devices()[:tensor]).reshape(1, tensor)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    model = layers.Sampler(nnx.Rngs(0), mesh)

    @jax.jit
    def sample(logits, metadata, rng):
        output = layers.LogitsProcessorOutput(next_token_logits=logits)
        return model(output, metadata, sort, rng_override=rng)[0]

    def draw(probabilities, draws=DRAWS, temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=0.0):
        def put(array, *spec):
            return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

        def rows(value, dtype):
            return put(np.full(draws, value, dtype), "data")

        numbers = np.arange(draws, dtype=np.int32)
        vocab = len(probabilities)
        metadata = sampling.SamplingMetadata(
            return_logprob=False,
            top_logprobs_nums=None,
            token_ids_logprobs=None,
            temperatures=put(np.full((draws, 1), temperature, np.float32), "data"),
            top_ps=rows(top_p, np.float32),
            top_ks=rows(top_k, np.int32),
            min_ps=rows(min_p, np.float32),
            # Half of them are negative. Positions repeat, so that seed and position both matter.
            sampling_seeds=put(numbers // 20 - 500, "data") if seeded else None,
            positions=put(numbers % 20, "data"),
            need_min_p_sampling=min_p > 0,
            linear_penalty=put(np.zeros((draws, vocab), np.float32), "data", "tensor"),
            vocab_mask=put(np.zeros((draws, (vocab + 31) // 32), np.int32), "data"),
        )
        logits = np.tile(np.log(probabilities).astype(np.float32), (draws, 1))
        return np.asarray(sample(put(logits, "data", "tensor"), metadata, jax.random.key(0)))

    if patched:
        patches.apply(PATCHES)
    else:
        patches.revert(PATCHES)
    draw(PROBABILITIES)  # compiles now, with these patches
    return draw


def p_value(ids, expected):
    """Return the chi-square p-value of the ids; 0 if one lies outside the support."""
    counts = np.bincount(ids, minlength=len(expected))
    support = expected > 0
    if counts[~support].any():
        return 0.0
    if support.sum() == 1:
        return 1.0
    return stats.chisquare(counts[support], expected[support] * len(ids)).pvalue


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("case", CASES)
def test_patched_sampler_draws_from_the_law(case, seeded):
    """With the patches, 20,000 draws over many seeds and positions follow the law."""
    ids = sampler(True, seeded)(PROBABILITIES, **CASES[case])
    assert p_value(ids, law(**CASES[case])) > 1e-4


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("case", CASES)
def test_patched_sorting_path_draws_from_the_law(case, seeded):
    """The same holds for the path that sorts (use_sort_for_toppk_minp)."""
    ids = sampler(True, seeded, sort=True)(PROBABILITIES, **CASES[case])
    assert p_value(ids, law(**CASES[case])) > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_upstream_seeded_draws_are_rejected(case):
    """Without the patches, no seeded draw follows its law."""
    ids = sampler(False, True)(PROBABILITIES, **CASES[case])
    assert p_value(ids, law(**CASES[case])) < 1e-6


@pytest.mark.parametrize("case", ["min_p", "temperature-min_p", "temperature-top_p", "all"])
def test_upstream_unseeded_draws_are_rejected(case):
    """Without the patches, min_p and a top_p with a temperature are drawn wrongly."""
    ids = sampler(False, False)(PROBABILITIES, **CASES[case])
    assert p_value(ids, law(**CASES[case])) < 1e-6


@pytest.mark.parametrize("case", ["plain", "temperature", "top_k", "temperature-top_k", "top_p"])
def test_upstream_unseeded_draws_are_otherwise_right(case):
    """Without the patches, the rest of the unseeded path is right, and no patch changes its law."""
    ids = sampler(False, False)(PROBABILITIES, **CASES[case])
    assert p_value(ids, law(**CASES[case])) > 1e-4


@pytest.mark.parametrize("case", ["plain", "all"])
def test_seeded_draws_with_two_devices_an_engine(case):
    """Sharded over two devices, the sampler draws the same ids as on one."""
    ids = sampler(True, True, tensor=2)(PROBABILITIES, **CASES[case])
    assert np.array_equal(ids, sampler(True, True)(PROBABILITIES, **CASES[case]))


def test_a_seeded_draw_is_categorical_of_its_own_key():
    """Each row is categorical(fold_in(key(seed), position), logits), whatever the other rows
    are."""
    import jax

    ids = sampler(True, True)(PROBABILITIES)
    logits = np.log(PROBABILITIES).astype(np.float32)
    for row in (0, 19, 20, 12_345):
        key = jax.random.fold_in(jax.random.key(row // 20 - 500), row % 20)
        assert ids[row] == jax.random.categorical(key, logits)


def test_seeded_draws_do_not_depend_on_the_generator_of_the_process():
    """A host that chose another random generator gets the same ids."""
    import jax

    from patches._lookup import module

    patches.apply(PATCHES)
    rows = np.arange(64, dtype=np.int32)
    operands = (np.tile(np.log(PROBABILITIES), (64, 1)), rows - 32, rows, None, False)
    draw = module("sgl_jax.srt.layers.sampler").multinomial_with_seed
    ids = draw(operands)
    with jax.default_prng_impl("rbg"):
        assert np.array_equal(draw(operands), ids)


def test_a_seed_of_none_is_upstream_draw():
    """Without seeds the original is called, with its key."""
    import jax

    from patches._lookup import module

    layers = module("sgl_jax.srt.layers.sampler")
    operands = (np.log(PROBABILITIES)[None], None, None, jax.random.key(3), False)
    ids = layers.multinomial_with_seed(operands)
    patches.apply(PATCHES)
    assert layers.multinomial_with_seed(operands) == ids
