"""The runs that this project was measured against, on a pool: weights swapped into dummy engines,
the KV cache dropped and made again, weights changed in place. `enginepool reference --help`."""
