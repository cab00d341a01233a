"""A model's thinking before an answer that is held to a form, which begins behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Thinking:
    """How a model tells its thinking from its answer.

    Attributes:
        begin_ids: The mark before it.
        end: The mark behind it, as text: a model may spell it in tokens of its own choice.
        begun: Whether the output begins inside of it; else it begins with that mark, or not at all.
        token_text: The text of a token.
    """

    begin_ids: tuple[int, ...]
    end: str
    begun: bool
    token_text: Callable[[int], str]


class Thought:
    """The thinking of one output, token by token: a function of its ids."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tail = ""
        self.state: Literal["may begin", "goes on", "is over"] = (
            "goes on" if thinking.begun else "may begin"
        )

    @property
    def first_id(self) -> int | None:
        """What begins it here, where it may."""
        return self._thinking.begin_ids[0] if self.state == "may begin" else None

    def take(self, token: int, *, fits_answer: bool) -> str | None:
        """Go on behind a token. Gives what it says of the answer, beyond the mark; None if the
        token is the answer's own.

        Args:
            fits_answer: Whether an answer may begin with it.
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
