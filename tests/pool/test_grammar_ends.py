"""Structured output where the tokenizer names no end token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, InvalidGrammar
from enginepool.toy.files import END_ID
from tests.support.checkpoints import set_json
from tests.support.pools import SMALL

WORD = {"regex": "[a-h]{2,5}", "max_new_tokens": 40, "temperature": 1.0}


def without_end(source: Path, folder: Path, **config: Any) -> str:
    """A checkpoint whose tokenizer names no end token, and has no token with the name of one."""
    shutil.copytree(source, folder)
    set_json(folder / "tokenizer_config.json", {"additional_special_tokens": []}, ("eos_token",))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = f"<|token_{token['id']}|>"
    file.write_text(json.dumps(content), encoding="utf-8")
    set_json(folder / "tokenizer_config.json", {"pad_token": "<|token_256|>"})
    set_json(folder / "config.json", config)
    set_json(folder / "generation_config.json", {}, ("eos_token_id",))
    return str(folder)


def test_the_models_end_token_ends_it(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """The end token that config.json names ends a complete output. No other id does."""
    model = without_end(model_dir("qwen3"), tmp_path / "model", eos_token_id=END_ID)
    with EnginePool(model, devices=1, warmup="none", **SMALL) as pool:
        for result in pool.generate_all(["a"] * 8, WORD):
            assert result["output_ids"][-1] == END_ID
            assert 2 <= len(result["text"]) <= 5
            assert set(result["text"]) <= set("abcdefgh")
            assert len(result["output_ids"]) == len(result["text"]) + 1


def test_a_grammar_without_an_end_token(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """No file names an end token. A grammar that would fill the output up is refused, and
    nothing else is."""
    model = without_end(model_dir("qwen3"), tmp_path / "model", eos_token_id=None)
    with EnginePool(model, devices=1, warmup="none", **SMALL) as pool:
        with pytest.raises(InvalidGrammar, match="needs an end token"):
            pool.generate("a", WORD)
        [result] = pool.generate_all(["a"], {"max_new_tokens": 3})
        assert len(result["output_ids"]) == 3
