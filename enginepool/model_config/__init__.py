"""Reads a checkpoint's configuration, and tells which of its fields the engines compute."""

# The families that are known: their sizes, and which fields their models compute. Upstream's class
# by `model_type`.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
