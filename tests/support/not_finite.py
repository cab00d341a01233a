"""A model with tokens that have no finite numbers. A prompt that has one is bad, other prompts
are good. An output ends at such a token."""

from pathlib import Path
from typing import Any

import numpy as np

from enginepool.toy.files import read_checkpoint
from scripts.train_toy.checkpoint import write_checkpoint
from tests.support.reference import make_random_model

# Tokens that no output contains.
BAD_TOKENS = (200, 201, 202)
# A token that outputs contain.
SPOKEN = 203


def write_spoiled(directory: Path, **shape: Any) -> Path:
    """A Qwen3 of random weights. The embeddings of these tokens are NaN.

    It has its own output matrix. With the embedding's rows in that matrix no prompt would have
    finite numbers.
    """
    make_random_model(directory, "qwen3", 1, tied=False, **shape)
    config, stored = read_checkpoint(directory)
    params = {name: np.array(array, np.float32) for name, array in stored.items()}
    params["model.embed_tokens.weight"][[*BAD_TOKENS, SPOKEN]] = np.nan
    params["lm_head.weight"][list(BAD_TOKENS)] = 0.0
    params["lm_head.weight"][SPOKEN] *= 1.5
    write_checkpoint(directory, params, config, np.float32)
    return directory


def not_finite(result: dict[str, Any]) -> bool:
    reason = result["meta_info"]["finish_reason"]
    return (reason["type"], reason.get("err_type")) == ("abort", "not_finite")
