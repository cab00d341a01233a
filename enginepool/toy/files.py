"""Reads a toy checkpoint: its token ids, its configuration and its weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

# Ids 0 to 255 are the bytes themselves; the special tokens follow.
PAD_TOKEN, PAD_ID = "<|endoftext|>", 256
START_TOKEN, START_ID = "<|im_start|>", 257
END_TOKEN, END_ID = "<|im_end|>", 258
VOCAB_SIZE = 272


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the weights, as stored, of a checkpoint in one safetensors file."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config, load_file(directory / "model.safetensors")
