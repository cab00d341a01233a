"""Models that spell strings in more tokens than their tokenizer does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from benchmarks.synthetic import write_model
from enginepool.toy.files import VOCAB_SIZE

# The letters that such a model generates most, one token each. Its tokenizer makes one token of any
# two of them.
LETTERS = "abcdefgh"
VOCABULARY = VOCAB_SIZE + len(LETTERS) ** 2


def write_speller(folder: Path, config: Mapping[str, Any], *, seed: int) -> Path:
    """Write a checkpoint of random weights that says letters more often than other bytes."""
    write_model(folder, {**config, "vocab_size": VOCABULARY}, seed=seed, std=0.15)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    table[[ord(letter) for letter in LETTERS]] *= 2.5
    file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return give_merges(folder, ["".join(pair) for pair in product(LETTERS, repeat=2)], VOCAB_SIZE)


def give_merges(folder: Path, strings: Sequence[str], first_id: int) -> Path:
    """Have a checkpoint's tokenizer, in which a byte is a token, merge each of these strings.

    Args:
        strings: No two begin with the same two bytes.
        first_id: The id of the first merged token. Each prefix of two bytes or more is a token.
            Special tokens with the ids of merged tokens are dropped.
    """
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], []
    characters = {token_id: character for character, token_id in vocabulary.items()}
    parts: list[str] = []
    for string in strings:
        spelled = [characters[byte] for byte in string.encode()]
        longer = list(accumulate(spelled))
        merges += [[left, right] for left, right in zip(longer[:-1], spelled[1:], strict=True)]
        parts += longer[1:]
    ids = {part: first_id + place for place, part in enumerate(parts)}
    kept = [token for token in content["added_tokens"] if token["id"] not in ids.values()]
    # In the vocabulary, special tokens keep their ids.
    named = {token["content"]: token["id"] for token in kept}
    content["model"] |= {"vocab": vocabulary | named | ids, "merges": merges}
    content["added_tokens"] = kept
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder
