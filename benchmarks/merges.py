"""Tokenizers that write some strings in fewer tokens than a model of bytes does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path


def give_merges(folder: Path, strings: Sequence[str], first_id: int) -> Path:
    """Let a checkpoint's tokenizer, for which every byte is a token, make one of each of these.

    Args:
        strings: No two have a beginning of two bytes in common.
        first_id: Of the merged tokens, one for each beginning of two bytes or more; special tokens
            that have these ids are dropped.
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
    # With those that stay in its vocabulary they keep their ids.
    named = {token["content"]: token["id"] for token in kept}
    content["model"] |= {"vocab": vocabulary | named | ids, "merges": merges}
    content["added_tokens"] = kept
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder
