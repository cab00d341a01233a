"""What a checkpoint's configuration means, and whether an engine computes that."""

# Of these upstream's models are known: their sizes, and what of a configuration they compute.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "qwen3_moe")
