"""What enginepool raises.

EnginePoolError
├── InvalidConfig (ValueError)      a constructor argument that cannot hold in a pool
├── InvalidRequest (ValueError)     bad input of a call; nothing of the call has started
│   └── InvalidGrammar              a grammar that does not compile
├── InvalidWeights (ValueError)     weights that do not fit the model; nothing was touched
├── WeightUpdateFailed              a device failed while new weights were put there
├── StaleWeights                    staged weights that may not be committed any more
├── EnginesDiffer                   engines that should have the same weights do not
├── QueueFull                       more requests wait than max_queued; nothing has started
├── PoolClosed                      the pool is closed; a closed pool cannot be opened again
├── PatchFailed                     a repair of upstream does not fit the installed sglang-jax
├── ForkedProcess               the pool was opened in the process that this one was forked from
├── EngineStartFailed               an engine could not be built or warmed up
├── StepTimeout                     a step of an engine does not return
├── NotFinite                       an engine's log-probabilities are not finite numbers
├── PoolFailed                      no engine is left to serve
│   └── NoWeights                   weights were released, or deleted by who shared them
└── RequestFailed                   one prompt ended early (only inside RequestsFailed)
RequestsFailed (ExceptionGroup)     what `raise_on_error=True` raises
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EnginePoolError(Exception):
    """Base of everything that enginepool raises on its own account.

    All of them pickle with their data; `__cause__` stays behind, as Python leaves it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own would call the constructor with the message alone.
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[EnginePoolError], args: tuple[Any, ...]) -> EnginePoolError:
    """An exception without its constructor, which may want more than `args`."""
    return kind.__new__(kind, *args)


class InvalidConfig(EnginePoolError, ValueError):
    """Raised by the constructor or by `open()` for an argument that cannot hold in a pool."""


class InvalidRequest(EnginePoolError, ValueError):
    """Raised for bad input of a call, before anything of that call has started.

    Attributes:
        prompt_index: Which prompt of the call is meant, or None when it is the call itself.
    """

    def __init__(self, message: str, *, prompt_index: int | None = None) -> None:
        where = "" if prompt_index is None else f"prompt {prompt_index}: "
        super().__init__(where + message)
        self.prompt_index = prompt_index


class InvalidGrammar(InvalidRequest):
    """Raised for a JSON schema, regular expression, grammar or structural tag that does not
    compile."""


class InvalidWeights(EnginePoolError, ValueError):
    """Raised by `update_weights` for a source that does not fit, with every engine as before; by
    `open()` for a checkpoint that does not fit its own configuration.

    Attributes:
        names: The tensors that are missing, unknown, misshapen or of a wrong dtype.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class WeightUpdateFailed(EnginePoolError):
    """Raised by `update_weights` when putting weights on a device failed; says what serves now.

    Attributes:
        engine_index: Whose device it was.
        name: The leaf that could not be put there, by the model's path; None if unknown.
    """

    def __init__(self, message: str, *, engine_index: int, name: str | None = None) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.name = name


class StaleWeights(EnginePoolError):
    """Raised by `commit()` of staged weights that were committed or discarded, have expired, or
    were overtaken by another update; no engine was touched. Stage them again."""


class EnginesDiffer(EnginePoolError):
    """Raised by checksums when engines do not have the same weights.

    Attributes:
        checksums: By engine index.
    """

    def __init__(self, message: str, *, checksums: dict[int, Any]) -> None:
        super().__init__(message)
        self.checksums = checksums


class QueueFull(EnginePoolError):
    """Raised with `when_full="raise"` for a call that finds no room; nothing of it has started."""


class PoolClosed(EnginePoolError):
    """Raised when a closed pool is used, and by calls that were waiting when it closed.

    Attributes:
        results: Of a call that was waiting: one entry a sample, in order, with what each has, as
            `PoolFailed` has them. Else empty.
    """

    def __init__(self, message: str, *, results: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class ForkedProcess(EnginePoolError):
    """Raised in a forked child by every use of a pool that its parent has opened. Closing it there
    does nothing."""


class PatchFailed(EnginePoolError):
    """Raised by `open()` when a patch does not fit the installed sglang-jax, and by `close()` when
    somebody replaced the same place since; `__cause__` is the `patches.PatchError`, which names
    the place. `python -m patches` shows which patches are needed."""


class EngineStartFailed(EnginePoolError):
    """Raised by `open()` when an engine could not be built; `__cause__` is the reason.

    The engines that had started are closed again, so nothing of the pool is left.
    """

    def __init__(self, message: str, *, engine_index: int, device_ids: Sequence[int]) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.device_ids = tuple(device_ids)


class StepTimeout(EnginePoolError):
    """Why an engine was given up: a step took longer than `step_timeout`. Seen in `stats()`."""


class NotFinite(EnginePoolError):
    """Why an engine was reset: log-probabilities that are not finite numbers. Seen in `stats()`.

    Attributes:
        requests: Those that got them, by the ids that engines know them by.
        alone: Nobody shared the step with them.
    """

    def __init__(self, requests: Sequence[str], *, alone: bool = False) -> None:
        who = "a request alone in its step" if alone else f"{len(requests)} in a step"
        super().__init__(f"{who} got log-probabilities that are not finite")
        self.requests = tuple(requests)
        self.alone = alone


class PoolFailed(EnginePoolError):
    """Raised when no engine is left to serve.

    Attributes:
        results: One entry a sample, in order, with what each has; a prompt that was not
            finished has `finish_reason {"type": "abort", ...}`.
    """

    def __init__(self, message: str, *, results: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class NoWeights(PoolFailed):
    """Raised when no engine has weights: released, or deleted by who shared them. The next
    `update_weights` recovers."""


class RequestFailed(EnginePoolError):
    """One prompt that ended early: timeout, cancelled, poisoned."""

    def __init__(self, message: str, *, prompt_index: int, err_type: str | None) -> None:
        super().__init__(f"prompt {prompt_index}: {message}")
        self.prompt_index = prompt_index
        self.err_type = err_type


class RequestsFailed(ExceptionGroup[RequestFailed]):
    """What `raise_on_error=True` raises: one `RequestFailed` a prompt that ended early.

    Attributes:
        results: The whole list that the call would have returned.
    """

    results: list[dict[str, Any]]

    def derive(self, excs: Sequence[Any]) -> Any:  # of `RequestFailed`: a part of this group
        group = RequestsFailed(self.message, excs)
        group.results = self.results
        return group
