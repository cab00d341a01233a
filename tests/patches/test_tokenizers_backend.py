"""Tokenizers that transformers 5 saved give the ids of their tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import patches
from enginepool import toy
from patches import tokenizers_backend
from patches._lookup import module

PATCH = tokenizers_backend.PATCH
TEXT, IDS = "<|im_start|>1", [257, 49]


def saved(folder: Path, **fields: Any) -> Path:
    """The toy's tokenizer as Llama's would be, with these fields in tokenizer_config.json. None
    removes a field."""
    shutil.copy(toy.checkpoint() / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    own = json.loads((toy.checkpoint() / "tokenizer_config.json").read_text(encoding="utf-8"))
    written = {name: value for name, value in (own | fields).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


# As transformers 5 writes it.
NEW: dict[str, Any] = {
    "tokenizer_class": "TokenizersBackend",
    "backend": "tokenizers",
    "is_local": True,
    "additional_special_tokens": None,
    "extra_special_tokens": ["<|im_start|>", "<|im_end|>"],
}


def load(folder: Path | str) -> Any:
    return module("sgl_jax.srt.hf_transformers_utils").get_tokenizer(str(folder))


@pytest.mark.skipif(not PATCH.is_needed(), reason="upstream loads it right")
def test_upstream_makes_another_of_it(tmp_path: Path) -> None:
    """Upstream loads a different tokenizer, or none."""
    folder = saved(tmp_path, **NEW)
    try:
        assert load(folder)(TEXT)["input_ids"] != IDS
    except (RuntimeError, ValueError) as error:
        assert "TokenizersBackend" in f"{error} {error.__cause__}"  # noqa: PT017


@pytest.mark.filterwarnings("ignore:Created patched tokenizer config")
@pytest.mark.parametrize("fields", [NEW, NEW | {"extra_special_tokens": {"image_token": "<|a|>"}}])
def test_its_ids_are_its_own(tmp_path: Path, fields: dict[str, Any]) -> None:
    patches.apply([PATCH])
    tokenizer = load(saved(tmp_path, **fields))
    assert (tokenizer(TEXT)["input_ids"], len(tokenizer)) == (IDS, 272)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    assert tokenizer.decode([257, 49, 258], skip_special_tokens=True) == "1"
    assert tokenizer.additional_stop_token_ids is None


@pytest.mark.filterwarnings("ignore:Created patched tokenizer config")
@pytest.mark.parametrize(
    "fields", [NEW, {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}]
)
def test_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    patches.apply([PATCH])
    (tmp_path / "model").mkdir()
    saved(tmp_path / "model", **fields)
    monkeypatch.chdir(tmp_path)
    assert load("model").eos_token_id == 258
