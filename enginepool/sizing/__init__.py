"""What fits a TPU, by arithmetic on a configuration: chips, weights, KV, defaults."""
