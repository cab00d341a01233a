"""Reads the prompts of a caller: texts or token ids, one or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.values import described, is_int, plain


def read_prompts(
    tokenizer: Tokenizer,
    prompts: Any,
    input_ids: Any,
    *,
    names: tuple[str, str] = ("prompts", "input_ids"),
    special_tokens: bool = True,
) -> tuple[Sequence[str | None], list[list[int]], bool]:
    """Read one prompt or a list of prompts.

    Returns:
        The text of each prompt (None where ids were given), its ids, and whether one prompt
        was given instead of a list.

    Args:
        names: The names of the two arguments, for errors.
        special_tokens: Whether the tokenizer adds its special tokens to texts.
    """
    of_texts, of_ids = names
    if (prompts is None) == (input_ids is None):
        raise InvalidRequest(f"give either {of_texts} or {of_ids}, and not both")
    if input_ids is not None:
        rows = as_list(of_ids, input_ids)
        lone = bool(rows) and _is_scalar(rows[0])
        rows = [rows] if lone else rows
        token_ids = [_plain_ids(of_ids, index, prompt) for index, prompt in enumerate(rows)]
        return [None] * len(token_ids), token_ids, lone
    prompts = plain(prompts)
    lone = isinstance(prompts, str)
    texts = [prompts] if lone else as_list(of_texts, prompts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(
                f"expected a string, got {type(text).__name__} {described(text)}; token ids "
                f"go to {of_ids}=, messages to chat()",
                prompt_index=index,
            )
    return texts, tokenizer.encode(texts, special_tokens=special_tokens), lone


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__iter__")


def as_list(name: str, value: Any, expected: str = "a list, one entry per prompt") -> list[Any]:
    """A caller's sequence or array as a list."""
    value = plain(value, depth=0)
    if isinstance(value, (str, bytes, Mapping)) or _is_scalar(value):
        raise InvalidRequest(f"{name}: expected {expected}, got {described(value)}")
    return list(value)


def _plain_ids(name: str, index: int, prompt: Any) -> list[int]:
    """Ids as Python integers, because upstream compares, concatenates and hashes them."""
    try:
        ids = as_list(name, prompt)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name}: expected a list of token ids, got {described(prompt)}", prompt_index=index
        ) from None
    if not set(map(type, ids)) <= {int}:
        ids = [plain(token_id) for token_id in ids]
    for token_id in ids:
        if not is_int(token_id):
            raise InvalidRequest(
                f"{name}: {described(token_id)} is not an integer", prompt_index=index
            )
    return ids
