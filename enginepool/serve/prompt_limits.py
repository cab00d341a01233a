"""Refuses what cannot fit a prompt, before time is spent on it.

Upstream's request models are filled on the event loop, and the tokenizer takes one text after the
other. So one large body would hold up all other clients, and Python cannot stop work that has
begun. The limits of prompts refuse nothing that an engine could take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.frontend.chat import check_messages
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.serve.chat_messages import as_turns
from enginepool.values import shown

# Fields whose lists of token ids are as long as prompts are.
_IDS = ("prompt", "input_ids", "token_ids", "tokens", "query", "items")
# These are repeated, in every chunk of a stream or at every step.
_NAMES, _LONGEST_NAME = ("model", "extra_key"), 1024
_CONVERSATION = ("messages", "tools", "chat_template_kwargs", "input", "instructions")
# A message, a tool or a text part is a few JSON values and at least one token.
_VALUES_A_TOKEN = 4
# For everything else: options, and sampling parameters of many prompts.
_OTHER_VALUES = 20_000
# A long text's beginning is tokenized first, with _FIRST_TRY characters for each token that fits.
# Cutting the text can add _CUT tokens.
_FIRST_TRY, _CUT = 8, 64


class PromptLimits:
    """The limits of one server.

    Args:
        tokens: The longest prompt, also one that is only scored.
        origin: The origin of this limit, in words.
        prompts: The most prompts in one request.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int, origin: str, prompts: int) -> None:
        self._tokenizer, self._tokens, self._origin = tokenizer, tokens, origin
        self._prompts = prompts
        self._longest = max(map(len, tokenizer.hf.get_vocab()))

    def check_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Refuse a body that is too large for upstream's request models. Messages are brought into
        the form that these take.

        Returns:
            The fields that hold token ids and nothing else.
        """
        for name in _NAMES:
            values = body.get(name)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, str) and len(value) > _LONGEST_NAME:
                    raise InvalidRequest(
                        f"{name}={shown(value)}: {len(value)} characters, expected at most "
                        f"{_LONGEST_NAME}"
                    )
        ids = {name: body[name] for name in _IDS if self._are_ids(name, body.get(name))}
        at_most = _OTHER_VALUES + _VALUES_A_TOKEN * self._tokens
        values, _ = _count({k: v for k, v in body.items() if k not in ids}, at_most)
        if values > at_most:
            raise InvalidRequest(
                f"the body has more than {at_most} JSON values: more than a prompt of "
                f"{self._tokens} tokens ({self._origin}) and its options can need"
            )
        if "input" in body or isinstance(body.get("messages"), list):
            conversation = [body[name] for name in _CONVERSATION if name in body]
            self._check_characters(_count(conversation, at_most)[1])
        if isinstance(body.get("messages"), list):
            body["messages"] = as_turns(body["messages"])
            check_messages(body["messages"])
        return ids

    def _are_ids(self, name: str, value: Any) -> bool:
        """Whether this is a prompt of token ids, or a list of such prompts.

        Raises:
            InvalidRequest: A prompt is too long, there are too many, or an id is true or false.
        """
        kinds = _kinds(name, value) if isinstance(value, list) else set()
        if kinds == {int}:
            self._check_length(len(value))
            return True
        if kinds and len(value) > self._prompts:
            raise InvalidRequest(
                f"{len(value)} prompts: at most {self._prompts} are taken in one request "
                "(--max-prompts)"
            )
        if kinds != {list}:
            return False
        for index, one in enumerate(value):
            self._check_length(len(one), index)
        return all(_kinds(name, one) <= {int} for one in value)

    def _check_length(self, tokens: int, index: int | None = None) -> None:
        if tokens > self._tokens:
            raise InvalidRequest(
                f"{tokens} tokens are too long: at most {self._tokens} fit one engine "
                f"({self._origin}); shorten the prompt or raise that limit",
                prompt_index=index,
            )

    def check_text(self, text: str) -> None:
        """Refuse a text with more tokens than fit. Ever longer beginnings of it are tokenized.

        Raises:
            InvalidRequest: The whole text would be refused, too.
        """
        self._check_characters(len(text))
        size = _FIRST_TRY * (self._tokens + _CUT)
        while size < len(text):
            with self._tokenizer.lock:
                tokens = len(self._tokenizer.hf(text[:size], add_special_tokens=False)["input_ids"])
            if tokens > self._tokens + _CUT:
                raise InvalidRequest(
                    f"{len(text)} characters are too long: the first {size} of them are {tokens} "
                    f"tokens, and at most {self._tokens} fit one engine ({self._origin})"
                )
            size *= 2

    def _check_characters(self, count: int) -> None:
        at_most = self._tokens * self._longest
        if count > at_most:
            raise InvalidRequest(
                f"{count} characters or more are too long: at most {self._tokens} tokens fit one "
                f"engine ({self._origin}), which are {at_most} characters at most"
            )


def _kinds(name: str, values: list[Any]) -> set[type]:
    """The types of these values. pydantic would read true as the token id 1."""
    kinds = set(map(type, values))
    if bool in kinds:
        raise InvalidRequest(f"{name}: true and false are no token ids")
    return kinds


def _count(value: Any, at_most: int) -> tuple[int, int]:
    """JSON values and characters. Stops soon after `at_most` values."""
    values = characters = 0
    rest = [value]
    while rest and values <= at_most:
        one = rest.pop()
        values += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, Mapping):
            characters += sum(map(len, one))
            values += len(one)
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return values, characters
