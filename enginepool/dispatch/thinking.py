"""A model's thinking before its answer. A grammar applies to the answer only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Thinking:
    """How a model marks its thinking.

    Attributes:
        begin_ids: The ids of the mark before the thinking.
        end: The text of the mark after the thinking. A model may spell this mark with any tokens.
        begun: Whether the output begins inside the thinking. Otherwise it begins with the mark, or
            it has no thinking.
        token_text: Returns the text of a token.
    """

    begin_ids: tuple[int, ...]
    end: str
    begun: bool
    token_text: Callable[[int], str]


class Thought:
    """Follows the thinking of one output, token by token."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tail = ""
        self.state: Literal["may begin", "goes on", "is over"] = (
            "goes on" if thinking.begun else "may begin"
        )

    @property
    def first_id(self) -> int | None:
        """The id that begins the thinking, if it may begin here."""
        return self._thinking.begin_ids[0] if self.state == "may begin" else None

    def take(self, token: int, *, fits_answer: bool) -> str | None:
        """Take the next token.

        Args:
            fits_answer: Whether an answer may begin with the token.

        Returns:
            The part of the token's text that follows the end mark. It is empty while the thinking
            goes on. None if the whole token belongs to the answer.
        """
        if self.state == "may begin":
            self.state = "is over" if fits_answer else "goes on"
        if self.state == "is over":
            return None
        end = self._thinking.end
        before, found, rest = (self._tail + self._thinking.token_text(token)).partition(end)
        if found:
            self.state = "is over"
        self._tail = before[-len(end) :]
        return rest.strip()
