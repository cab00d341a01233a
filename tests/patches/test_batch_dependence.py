"""Upstream's real sampler, in a batch whose rows are all greedy and in one whose rows are not."""

import numpy as np

import patches
from patches import batch_dependence, seeded_sampler, top_p_order

VOCAB = 64
TEMPERATURES = np.array([1.0, 0.25, 3.0, 0.01], np.float32)


def sample(all_greedy, dtype=np.float32):
    """Ids and log-probabilities of four rows with top_k=1, and the logits."""
    import jax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from patches._lookup import module

    sampling = module("sgl_jax.srt.sampling.sampling_batch_info")
    layers = module("sgl_jax.srt.layers.sampler")
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    rows = len(TEMPERATURES)
    logits = np.random.default_rng(3).normal(0, 4, (rows, VOCAB)).astype(dtype)
    logits[:, 40] = logits[:, 9] = logits.max(axis=1)  # equally probable, and the best
    metadata = sampling.SamplingMetadata(
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
        temperatures=put(TEMPERATURES[:, None], "data"),
        top_ps=put(np.ones(rows, np.float32), "data"),
        top_ks=put(np.ones(rows, np.int32), "data"),
        min_ps=put(np.zeros(rows, np.float32), "data"),
        sampling_seeds=put(np.arange(rows, dtype=np.int32), "data"),
        positions=put(np.arange(rows, dtype=np.int32), "data"),
        is_all_greedy=all_greedy,
        linear_penalty=put(np.zeros((rows, VOCAB), np.float32), "data", "tensor"),
        vocab_mask=put(np.zeros((rows, VOCAB // 32), np.int32), "data"),
    )
    model = layers.Sampler(nnx.Rngs(0), mesh)

    @jax.jit
    def draw(logits, metadata, rng):
        output = layers.LogitsProcessorOutput(next_token_logits=logits)
        return model(output, metadata, False, rng_override=rng)[:2]

    ids, logprobs = draw(put(logits, "data", "tensor"), metadata, jax.random.key(0))
    return np.asarray(ids), np.asarray(logprobs, np.float64), logits.astype(np.float64)


def law(logits):
    scaled = logits / TEMPERATURES[:, None]
    scaled -= scaled.max(axis=1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))


def error(logprobs, logits):
    """The error relative to the value: at temperature .01 log-probabilities reach -3,000."""
    return (np.abs(logprobs - law(logits)) / (1 + np.abs(law(logits)))).max()


def test_upstream_looks_at_the_whole_batch():
    """Its greedy path ignores the temperature. Its other path loses improbable ids."""
    patches.apply([seeded_sampler.PATCH, top_p_order.PATCH])
    for all_greedy in (True, False):
        _, logprobs, logits = sample(all_greedy)
        assert error(logprobs, logits) > 0.1


def test_a_row_does_not_depend_on_the_batch():
    """Ids and values are the same in both batches, also with bfloat16 logits. They follow the
    law, and ties go to the first id."""
    patches.apply([seeded_sampler.PATCH, top_p_order.PATCH, batch_dependence.PATCH])
    import ml_dtypes

    for dtype in (np.float32, ml_dtypes.bfloat16):
        both = [sample(all_greedy, dtype) for all_greedy in (True, False)]
        for ids, logprobs, logits in both:
            assert ids.tolist() == [9] * len(TEMPERATURES)
            assert error(logprobs, logits) < 1e-5
        np.testing.assert_array_equal(both[0][1], both[1][1])
