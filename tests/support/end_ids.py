"""The end ids that upstream reads from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from patches._lookup import module
from tests.support.checkpoints import set_json
from tests.support.reference import random_config

FILES = tuple[Any, Any]


def model_ends(folder: Path, files: FILES) -> Any:
    """The end ids of a checkpoint whose config.json and generation_config.json have these
    `eos_token_id`.

    Upstream reads each file once for each process and path.
    """
    config = random_config("qwen3", 1, 1, 1, np.float32) | {"eos_token_id": files[0]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    set_json(folder / "generation_config.json", {"eos_token_id": files[1]})
    return module("sgl_jax.srt.configs.model_config").ModelConfig(str(folder)).hf_eos_token_id
