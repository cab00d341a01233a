"""`make tpu-check`: finds programs of a pool that a TPU would refuse, without a TPU."""
