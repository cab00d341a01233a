"""The tokenizer that upstream's chat class renders with: bounded, and locked only to encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.requests.tokenizer import Tokenizer
from enginepool.serve.bounds import Bounds


class Rendering:
    """The Hugging Face tokenizer's attributes, and these methods in place of its own."""

    def __init__(self, tokenizer: Tokenizer, bounds: Bounds) -> None:
        self._tokenizer, self._bounds = tokenizer, bounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer.hf, name)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> list[int]:
        """Token ids. Other requests can be encoded while the template runs."""
        assert tokenize
        fitted = self._tokenizer.chat.fit(messages, options.get("chat_template"))
        text = self._tokenizer.hf.apply_chat_template(fitted, tokenize=False, **options)
        return self._encode(text, add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def _encode(self, text: str, **options: Any) -> list[int]:
        self._bounds.check_text(text)
        with self._tokenizer.lock:
            return self._tokenizer.hf(text, **options)["input_ids"]
