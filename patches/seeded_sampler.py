"""Seeded draws follow the distribution.

What breaks: With a sampling seed, tokens of probability .7 and .3 come out .5 and .5, and
.5/.3/.2 comes out .47/.16/.37, over any number of seeds.

Why: `multinomial_with_seed` hashes as `seed * a ^ column * b` and keeps 24 bits. The noise of two
tokens then differs by the same bit mask for every seed and position, so it is not independent.

What we change: Each row draws with its own key, `fold_in(key(seed), position)`, as
`jax.random.categorical` does. The draw depends on the row's seed, position and logits alone. The
generator is threefry: with JAX's `rbg` a row would depend on its neighbours under vmap. Programs
that were compiled before keep upstream's draw.

Remove when: Upstream's seeded draws pass tests/patches/test_sampling_law.py. (The constants of the
hash come from SGLang: https://github.com/sgl-project/sglang/issues/10938.)
"""

import numpy as np

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.sampler"


def _is_needed(original) -> bool:
    """Draw from .7/.3 for 2,000 seeds, in NumPy if upstream's code allows it."""
    seeds = np.arange(2000, dtype=np.int32)
    probabilities = np.tile(np.array([0.7, 0.3], np.float32), (len(seeds), 1))
    draws = with_globals(original, jnp=np)((probabilities, seeds, seeds * 0 + 5, None, True))
    # The standard deviation of the share is .01.
    return abs(float(np.mean(np.asarray(draws) == 0)) - 0.7) > 0.06


def _replace(original):
    def multinomial_with_seed(operands):
        inputs, seeds, positions, _, use_probs = operands
        if seeds is None:
            return original(operands)
        jax = module("jax")

        def noise(seed, position):
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
            return jax.random.gumbel(key, inputs.shape[1:], jax.numpy.float32)

        logits = jax.numpy.log(inputs) if use_probs else inputs
        # Sampling by Gumbel noise is jax.random.categorical, row by row.
        rows = jax.vmap(noise)(_replicated(jax, seeds), _replicated(jax, positions))
        # The reshape gives the sharding of the unseeded draw. 0.0.3rc99 puts both into one
        # `lax.cond`, and JAX wants them equal.
        return jax.numpy.argmax(logits + rows, axis=-1).reshape(-1, 1)

    return multinomial_with_seed


def _replicated(jax, array):
    """Replicate an array over its mesh, as the noise of unseeded draws is.

    Upstream's sampler runs outside of `jax.set_mesh`. There JAX 0.8.1 cannot lower random bits of
    keys that are sharded over an explicit axis.
    """
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return array
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None))
    return jax.sharding.reshard(array, replicated)


PATCH = Patch(
    name="seeded_sampler",
    issue="not reported",
    replaced=(Target(_MODULE, "multinomial_with_seed", _replace, ("operands",)),),
    probe=_is_needed,
)
