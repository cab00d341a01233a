"""Steady decode: a batch that stays the same stays on its device, one step ahead of its host."""
