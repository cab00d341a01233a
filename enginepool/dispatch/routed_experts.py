"""The experts to which the tokens of one request were routed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    Attributes:
        layers: For each layer, whether it has experts.
        top_k: How many experts a token is routed to.
        dtype: The smallest type that holds every expert's number.
    """

    layers: Sequence[bool]
    top_k: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape kept for a token: (layers with experts, experts per token)."""
        return sum(self.layers), self.top_k


class RoutedTokens:
    """The experts of a request's tokens, from its first position on. A request that resumes has its
    tokens computed again. The experts of the first computation stay.

    Attributes:
        count: The number of positions whose experts are known.
        stored: The number of positions whose experts the engine has stored by KV slot.
    """

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self.count = self.stored = 0
        self._rows = np.zeros((64, *routing.shape), routing.dtype)

    def extend(self, start: int, rows: np.ndarray) -> None:
        """Take the experts of positions from `start` on; those that are known stay.

        Raises:
            RuntimeError: Positions between are missing.
        """
        if start > self.count:
            raise RuntimeError(f"experts of positions {self.count} to {start} are missing")
        new = rows[self.count - start :]
        needed = self.count + len(new)
        if needed > len(self._rows):
            larger = np.zeros((max(needed, 2 * len(self._rows)), *self._rows.shape[1:]))
            self._rows, old = larger.astype(self._rows.dtype), self._rows
            self._rows[: self.count] = old[: self.count]
        self._rows[self.count : needed] = new
        self.count = needed

    def cut(self, end: int) -> None:
        """Forget the experts of positions from `end` on."""
        self.count, self.stored = min(self.count, end), min(self.stored, end)

    def rows(self, start: int, end: int) -> np.ndarray:
        """The experts of positions `start` to `end`, of layers with experts only."""
        return self._rows[start : min(end, self.count)]

    def whole(self, end: int) -> np.ndarray:
        """The experts of positions before `end`, of all layers, with -1 in dense layers. This is
        sglang's form."""
        rows = self.rows(0, end)
        whole = np.full((len(rows), len(self.routing.layers), self.routing.top_k), -1, np.int32)
        whole[:, np.flatnonzero(self.routing.layers)] = rows
        return whole

    @classmethod
    def of_whole(cls, routing: Routing, whole: np.ndarray) -> RoutedTokens:
        """The inverse of `whole`."""
        made = cls(routing)
        made.extend(0, whole[:, np.flatnonzero(routing.layers)].astype(routing.dtype))
        return made
