"""Compiles a pool's programs ahead of time, to find what a TPU would refuse."""
