"""Reads a checkpoint's configuration, and tells which of its fields the engines compute."""

# Upstream's class of each known family, by `model_type`. For a known family the package knows the
# sizes of tensors and the fields that the model computes.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
