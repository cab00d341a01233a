"""The tokenizer that upstream's classes render prompts with. It is locked only while it encodes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyio import CapacityLimiter
from pydantic import BaseModel

from enginepool.frontend.tokenizer import Tokenizer
from enginepool.serve.prompt_limits import PromptLimits

# Limits on threads, so that other work finds some.
_TEMPLATES_AT_ONCE = 4
_LARGE_AT_ONCE = 4
_GRAMMARS_AT_ONCE = 64  # most of them wait
LARGE = 1 << 16  # characters or token ids of one body
_TEXTS_KEPT = 1 << 16
_SHORTEST_QUOTE = 4  # characters; an error may have a shorter text of the body by chance


def why_not_rendered(error: Exception, body: BaseModel) -> str:
    """The message of a template's error or of a TypeError, unless it repeats what was sent.

    Other errors quote values, so only their name is given.
    """
    name, said = type(error).__name__, str(error)
    if not (isinstance(error, TypeError) or type(error).__module__.startswith("jinja2")):
        return name
    if any(text in said for text in _texts(body.model_dump()) if len(text) >= _SHORTEST_QUOTE):
        return name
    return f"{name}: {said}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


class Rendering:
    """The Hugging Face tokenizer, with some methods replaced.

    Attributes:
        limiter: Limits the threads that chat templates run on.
        large: Limits those that take large prompts.
        grammars: Limits those that wait for a grammar.
        refused_template_options: Arguments of the tokenizer's `apply_chat_template` itself. With
            them a client could bring its own template.
    """

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits) -> None:
        self._tokenizer = tokenizer
        self.check_text = limits.check_text
        self.token_text = functools.lru_cache(_TEXTS_KEPT)(tokenizer.token_text)
        self.limiter = CapacityLimiter(_TEMPLATES_AT_ONCE)
        self.large = CapacityLimiter(_LARGE_AT_ONCE)
        self.grammars = CapacityLimiter(_GRAMMARS_AT_ONCE)
        options = set(inspect.signature(tokenizer.hf.apply_chat_template).parameters)
        # The functions that render a template have arguments of these names.
        beside = {"messages", "self", "conversations"}
        self.refused_template_options = (options | beside) - {"documents", "kwargs"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer.hf, name)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> list[int]:
        """Token ids. Other requests can be encoded while the template runs."""
        assert tokenize
        fitted = self._tokenizer.chat.fit(messages, options.get("chat_template"))
        text = self._tokenizer.hf.apply_chat_template(fitted, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.check_text(text)
        with self._tokenizer.lock:
            return self._tokenizer.hf(text, **options)["input_ids"]
