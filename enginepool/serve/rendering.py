"""The tokenizer that upstream's classes render prompts with: bounded, locked only to encode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyio import CapacityLimiter
from pydantic import BaseModel

from enginepool.frontend.tokenizer import Tokenizer
from enginepool.serve.prompt_limits import PromptLimits

# So that threads are left for the rest.
_TEMPLATES_AT_ONCE = 4
_LARGE_AT_ONCE = 4
_GRAMMARS_AT_ONCE = 64  # of which most only wait
LARGE = 1 << 16  # characters or token ids of one body
_TEXTS_KEPT = 1 << 16
_TELLING = 4  # characters; shorter texts are parts of any sentence


def why_not_rendered(error: Exception, body: BaseModel) -> str:
    """A template's own words, or Python's over a type, unless they repeat what was sent; of
    anything else, which quotes what it does not take, its name."""
    name, said = type(error).__name__, str(error)
    if not (isinstance(error, TypeError) or type(error).__module__.startswith("jinja2")):
        return name
    if any(text in said for text in _texts(body.model_dump()) if len(text) >= _TELLING):
        return name
    return f"{name}: {said}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


class Rendering:
    """The Hugging Face tokenizer's attributes, and these methods in place of its own.

    Attributes:
        limiter: Of the threads that chat templates run on.
        large: Of those that take the prompts of large bodies.
        grammars: Of those that have grammars compiled.
        template_options: Names that mean something to the tokenizer's `apply_chat_template`
            itself, not to the template: with them a client would bring its own program.
    """

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits) -> None:
        self._tokenizer = tokenizer
        self.check_text = limits.check_text
        self.token_text = functools.lru_cache(_TEXTS_KEPT)(tokenizer.token_text)
        self.limiter = CapacityLimiter(_TEMPLATES_AT_ONCE)
        self.large = CapacityLimiter(_LARGE_AT_ONCE)
        self.grammars = CapacityLimiter(_GRAMMARS_AT_ONCE)
        options = set(inspect.signature(tokenizer.hf.apply_chat_template).parameters)
        # The last two are names of what calls the template.
        beside = {"messages", "self", "conversations"}
        self.template_options = (options | beside) - {"documents", "kwargs"}

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

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._encode(text, **options)

    def _encode(self, text: str, **options: Any) -> list[int]:
        self.check_text(text)
        with self._tokenizer.lock:
            return self._tokenizer.hf(text, **options)["input_ids"]
