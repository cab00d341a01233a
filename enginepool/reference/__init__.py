"""The command `enginepool reference`.

It repeats, with a pool, experiments that another project published for sglang-jax on a TPU: real
weights for engines with dummy weights, a KV cache that is freed and made again, weights that change
in place. "The original scripts" are that project's programs. Phases are named as in these scripts
and have the same fields."""
