"""Checkpoints in which one token has no finite numbers: who sends it has none, and nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.synthetic import read_model

# No byte of a text, and no token with a meaning of its own.
BAD_TOKEN = 264
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def spoil(directory: Path) -> Path:
    """Make the token's embedding NaN, in a checkpoint whose output matrix was the embedding.

    It is a matrix of its own from here on, in which the token is as good as never the best.
    """
    config, params = read_model(directory)
    params[_HEAD] = params[_EMBEDDING].copy()
    params[_HEAD][BAD_TOKEN] = 0.0
    params[_EMBEDDING] = params[_EMBEDDING].copy()
    params[_EMBEDDING][BAD_TOKEN] = np.nan
    for file in directory.glob("*.safetensors"):
        file.unlink()
    save_file(params, directory / "model.safetensors", metadata={"format": "pt"})
    config["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
