"""What a checkpoint's configuration means, and whether an engine computes that."""

# Of these upstream's models are known: their sizes, and what of a configuration they compute. By
# `model_type`, the class of upstream's.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
