"""How an engine's thread reports a failure, and what it is told to do: a protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from enginepool.dispatch.request import Request


@dataclass(frozen=True)
class Decision:
    """What becomes of an engine that failed.

    Attributes:
        action: "reset" makes the scheduler's state and the KV cache anew, in milliseconds;
            "rebuild" all of the engine; "stay out" neither.
        delay: Seconds to wait before.
        attempt: Which in a row this is, from 1.
        why: What keeps it out beside its own failure, if something does.
    """

    action: Literal["reset", "rebuild", "stay out"]
    delay: float = 0.0
    attempt: int = 1
    why: str | None = None


class Supervisor[Worker](Protocol):
    """Each method is called on the engine's thread, with its worker."""

    def engine_failed(
        self, worker: Worker, error: BaseException, trace: str, requests: list[Request]
    ) -> None:
        """A step failed; the requests are out of the engine.

        Args:
            trace: The error's traceback, as Python prints it.
        """

    def decide(self, worker: Worker, error: BaseException) -> Decision:
        """What the engine that failed is to do, once its requests are taken care of."""
        ...

    def recovery_failed(self, worker: Worker, error: Exception, trace: str) -> Decision:
        """The engine could not be made anew; what it is to do now."""
        ...

    def weights_for(self, worker: Worker) -> Literal["sibling", "checkpoint", "nowhere"]:
        """Where the weights are, beside this engine, that it is to come back with."""
        ...

    def readmit(self, worker: Worker, decision: Decision, seconds: float) -> bool:
        """Give an engine that was made anew, in so many seconds, what all have, and let it serve;
        False if the pool was closed."""
        ...

    def engine_unloaded(self, worker: Worker, requests: list[Request]) -> None:
        """An engine has lost its weights; the requests are out of it."""

    def engine_closed(self, requests: list[Request]) -> None:
        """An engine's thread ends; no engine has these requests."""
