"""Steady decode: a batch stays on its device, and the host launches the next step ahead."""
