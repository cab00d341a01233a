"""Trains the toy's checkpoints. It is not part of the package."""
