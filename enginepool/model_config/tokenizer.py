"""Checks that the installed transformers has the class that a tokenizer names."""

from __future__ import annotations

from enginepool.errors import InvalidConfig
from enginepool.values import shown

# Transformers 5's name of its wrapper around a tokenizer.json; see patches/tokenizers_backend.py.
_BACKEND = "TokenizersBackend"


def check_tokenizer_class(path: str, revision: str | None, trust_remote_code: bool) -> None:
    """Check that transformers has the class that a tokenizer names.

    Without this check, upstream fails minutes later and its error names a wrong remedy.

    Args:
        path: A directory or hub id. The .json and .gguf files that upstream takes have no class.

    Raises:
        InvalidConfig: transformers does not have it.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import (
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    if path.endswith((".json", ".gguf")):
        return
    try:
        config = get_tokenizer_config(path, revision=revision)
    except (OSError, ValueError):  # upstream reads it too, and reports the error
        return
    name = config.get("tokenizer_class")
    if name in (None, _BACKEND) or (trust_remote_code and "auto_map" in config):
        return
    if not isinstance(name, str) or not any(
        tokenizer_class_from_name(one) for one in (name, f"{name}Fast")
    ):
        raise InvalidConfig(
            f"{path}: tokenizer_config.json: tokenizer_class={shown(name)} does not exist in "
            f"transformers {transformers.__version__}; for a tokenizer.json write "
            "PreTrainedTokenizerFast"
        )
