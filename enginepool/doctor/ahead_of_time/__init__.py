"""What a TPU would refuse, found without one: a pool's programs, compiled ahead of time."""
