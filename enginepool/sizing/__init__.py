"""Computes from a configuration what fits a TPU: chips, weights, KV, defaults."""
