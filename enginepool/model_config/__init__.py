"""What a checkpoint's configuration means, and whether an engine computes that."""
