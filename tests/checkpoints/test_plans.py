"""`plan` and pools refuse impossible configurations and models that do not exist."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig
from enginepool.doctor.plan.plan import make
from tests.support.reference import random_config

COUNTS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
)
DERIVED = ("num_key_value_heads", "head_dim", "num_experts")


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in COUNTS for value in (None, 0, "8", [])]
    + [(field, value) for field in DERIVED for value in ("8", [8], -1, 1.5, True)]
    + [("model_type", ["qwen3"])],
)
def test_a_field_that_is_no_count_names_itself(tmp_path: Path, field: str, value: Any) -> None:
    config = random_config("qwen3_moe", 2, 4, 2, np.float32) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match=field):
        make(str(tmp_path), "v5e-8")


@pytest.mark.parametrize("model", ["someone/nothing", "nothing", "/no/such/directory", "."])
def test_a_model_that_is_not_there(model: str) -> None:
    """This includes a hub id without a network. The error says which model was looked for, and
    how."""
    with pytest.raises(InvalidConfig) as planned:
        make(model, "v5e-8")
    pool = EnginePool(model, devices=1, warmup="none")
    with pytest.raises(InvalidConfig) as opened:
        pool.open()
    for caught in (planned, opened):
        assert str(caught.value).startswith(f"{model}: the configuration cannot be read: ")
    if model == "someone/nothing":
        assert "We couldn't connect to" in str(opened.value)
