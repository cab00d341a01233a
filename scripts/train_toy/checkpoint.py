"""Writes a toy checkpoint: configuration, byte-level tokenizer and weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from enginepool.toy.files import END_ID, END_TOKEN, PAD_ID, PAD_TOKEN, START_TOKEN, VOCAB_SIZE
from enginepool.toy.model import Config, head_dim

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    # The weights are stored as bfloat16, but their figures are measured in float32.
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

# Both engines and transformers read this as greedy decoding. (transformers warns of a temperature
# beside `do_sample: false`, and upstream's Engine does not read `do_sample`.)
GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True,
    "top_k": 1,
    "max_new_tokens": 16,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}


def write_checkpoint(
    directory: Path,
    params: Mapping[str, np.ndarray],
    config: Mapping[str, Any] = CONFIG,
    dtype: Any = ml_dtypes.bfloat16,
) -> None:
    """Write a Hugging Face checkpoint directory, its weights stored as `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(value, dtype) for name, value in params.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", GENERATION_CONFIG)
    write_tokenizer(directory)


def _has_attention_bias(config: Config) -> bool:
    """Whether the q, k and v projections have biases. Qwen2's have them, although its configuration
    has no such field."""
    return config.get("attention_bias", config["model_type"] == "qwen2")


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by its Hugging Face name."""
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q_size = config["num_attention_heads"] * dim
    kv_size = config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if _has_attention_bias(config):
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                layer[f"self_attn.{name}_proj.bias"] = (size,)
        if config["model_type"] == "qwen3":
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (dim,)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    One token a byte and no merges, so any text survives encoding and decoding exactly.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # type: ignore[assignment]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    # Every id of the network's output has a name, so an engine can decode whatever it samples.
    names = [PAD_TOKEN, START_TOKEN, END_TOKEN]
    names += [f"<|reserved_{index}|>" for index in range(VOCAB_SIZE - 256 - len(names))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TOKEN,
            "pad_token": PAD_TOKEN,
            "additional_special_tokens": [START_TOKEN, END_TOKEN],
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_vocabulary() -> dict[str, int]:
    """Byte values by the characters that represent them in a byte-level tokenizer.

    A printable byte's character is its own; the other bytes, in rising order, have characters
    from code point 256 on.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: ord(c) for c in characters if ord(c) < 256}
    unprintable = [byte for byte in range(256) if chr(byte) not in vocabulary]
    stand_ins = [c for c in characters if ord(c) >= 256]
    return vocabulary | dict(zip(stand_ins, unprintable, strict=True))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
