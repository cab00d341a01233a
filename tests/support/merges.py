"""A tokenizer that writes some strings in fewer tokens than a model of bytes does."""

import json
from itertools import accumulate
from pathlib import Path

# What it makes one token of, beside every byte. All begin with other characters.
MERGED = ("efg", "谁🙂", "th")
_FIRST_ID = 259


def give_merges(folder: Path) -> Path:
    """Put it in the place of a checkpoint's own, in which every byte is a token. The merged ids are
    those of the first special tokens that nothing uses."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], []
    characters = {token_id: character for character, token_id in vocabulary.items()}
    parts = []
    for text in MERGED:
        spelled = [characters[byte] for byte in text.encode()]
        merges += [
            [left, right] for left, right in zip(accumulate(spelled), spelled[1:], strict=False)
        ]
        parts += list(accumulate(spelled))[1:]
    ids = {part: _FIRST_ID + place for place, part in enumerate(parts)}
    kept = []
    for token in content["added_tokens"]:
        if token["id"] not in ids.values():
            kept.append(token)
            vocabulary[token["content"]] = token["id"]
    content["model"] |= {"vocab": vocabulary | ids, "merges": merges}
    content["added_tokens"] = kept
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder
