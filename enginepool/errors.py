"""The exceptions of enginepool.

EnginePoolError
├── InvalidConfig (ValueError)      a constructor argument that is not possible in a pool
├── InvalidRequest (ValueError)     bad input of a call; the call has not started
│   └── InvalidGrammar              a grammar that does not compile
├── InvalidWeights (ValueError)     weights that do not fit the model; no engine has changed
├── WeightUpdateFailed              a device failed during an update of weights
├── StaleWeights                    staged weights that can no longer be committed
├── EnginesDiffer                   engines do not have the same weights
├── QueueFull                       more requests wait than max_queued; the call has not started
├── PoolClosed                      the pool is closed; a closed pool cannot be opened again
├── PatchFailed                     a patch does not fit the installed sglang-jax
├── ForkedProcess                   the pool was opened in the parent process of this fork
├── EngineStartFailed               an engine could not be built or warmed up
├── StepTimeout                     a step of an engine does not return
├── NotFinite                       log-probabilities of an engine are not finite numbers
├── PoolFailed                      no engine is left to serve
│   └── NoWeights                   weights were released or deleted, or an update failed
└── RequestFailed                   one output ended early (only inside RequestsFailed)
RequestsFailed (ExceptionGroup)     what `raise_on_error=True` raises
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EnginePoolError(Exception):
    """Base of all errors that enginepool defines.

    Pickling keeps their data, but not `__cause__`.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's default `__reduce__` would call the constructor with the message alone.
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[EnginePoolError], args: tuple[Any, ...]) -> EnginePoolError:
    """Make an exception without calling its constructor, which may need more than `args`."""
    return kind.__new__(kind, *args)


class InvalidConfig(EnginePoolError, ValueError):
    """Raised by the constructor or by `open()` for an argument that is not possible in a pool."""


class InvalidRequest(EnginePoolError, ValueError):
    """Raised for bad input of a call, before anything of the call has started.

    Attributes:
        prompt_index: The index of the bad prompt. None if the error is not in one prompt.
    """

    def __init__(self, message: str, *, prompt_index: int | None = None) -> None:
        where = "" if prompt_index is None else f"prompt {prompt_index}: "
        super().__init__(where + message)
        self.prompt_index = prompt_index


class InvalidGrammar(InvalidRequest):
    """Raised for a JSON schema, regular expression, grammar or structural tag that does not
    compile."""


class InvalidWeights(EnginePoolError, ValueError):
    """Raised by `update_weights` for a source that does not fit, and by `open()` for a checkpoint
    that does not fit its configuration. No engine has changed. `update_weights` names an exception:
    an iterator.

    Attributes:
        names: The tensors or leaves that the error is about.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class WeightUpdateFailed(EnginePoolError):
    """Raised by `update_weights` if a device failed. Other calls that read or change weights or
    memory raise it while all engines have failed and are being brought back. All engines that serve
    have the same version.

    Attributes:
        engine_index: The engine that failed, or the first of them.
        name: The leaf that failed, by the model's path. None if it is not known.
    """

    def __init__(self, message: str, *, engine_index: int, name: str | None = None) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.name = name


class StaleWeights(EnginePoolError):
    """Raised by `commit()` on weights that were committed, discarded or replaced before, or have
    expired. No engine has changed. Stage them again."""


class EnginesDiffer(EnginePoolError):
    """Raised by checksums if engines do not have the same weights.

    Attributes:
        checksums: The checksum of each engine, by engine index.
    """

    def __init__(self, message: str, *, checksums: dict[int, Any]) -> None:
        super().__init__(message)
        self.checksums = checksums


class QueueFull(EnginePoolError):
    """Raised with `when_full="raise"` if the queue has no room for a call. It has not started."""


class _WithResults(EnginePoolError):
    def __init__(self, message: str, *, results: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class PoolClosed(_WithResults):
    """Raised by calls on a closed pool, and by calls that wait when the pool closes.

    Attributes:
        results: The results of a call that waited, as in `PoolFailed`. Empty for other calls.
    """


class ForkedProcess(EnginePoolError):
    """Raised in a forked child by every call on a pool that its parent has opened, except `close`,
    which does nothing."""


class PatchFailed(EnginePoolError):
    """Raised by `open()` if a patch does not fit the installed sglang-jax, and by `close()` if
    other code has replaced the patched attribute since.

    `__cause__` is the `patches.PatchError`, which names the attribute. `python -m patches` shows
    which patches are needed.
    """


class EngineStartFailed(EnginePoolError):
    """Raised by `open()` if an engine could not be built or warmed up. `__cause__` is the reason.

    All engines that had started are closed again.
    """

    def __init__(self, message: str, *, engine_index: int, device_ids: Sequence[int]) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.device_ids = tuple(device_ids)


class StepTimeout(EnginePoolError):
    """Not raised to callers. `stats()` shows it as the reason of an engine whose step took longer
    than `step_timeout`."""


class NotFinite(EnginePoolError):
    """Not raised to callers. `stats()` shows it as the reason of an engine whose log-probabilities
    are not finite numbers.

    Attributes:
        requests: The requests that got them, by the ids that engines use.
        alone: Whether no other request shared the step.
    """

    def __init__(self, requests: Sequence[str], *, alone: bool = False) -> None:
        who = "a request alone in its step" if alone else f"{len(requests)} requests in a step"
        super().__init__(f"{who} got log-probabilities that are not finite")
        self.requests = tuple(requests)
        self.alone = alone


class PoolFailed(_WithResults):
    """Raised if no engine is left to serve.

    Attributes:
        results: One result per sample, in order, with the tokens that it has. A sample that was not
            finished has `finish_reason {"type": "abort", ...}`.
    """


class NoWeights(PoolFailed):
    """Raised if an engine that a call needs has no weights: they were released, their owner deleted
    them, or an update failed. The next `update_weights` brings new ones."""


class RequestFailed(EnginePoolError):
    """An output that ended early, such as by timeout. Part of `RequestsFailed`."""

    def __init__(self, message: str, *, prompt_index: int, err_type: str | None) -> None:
        super().__init__(f"prompt {prompt_index}: {message}")
        self.prompt_index = prompt_index
        self.err_type = err_type


class RequestsFailed(ExceptionGroup[RequestFailed]):
    """Raised with `raise_on_error=True`: one `RequestFailed` for each output that ended early.

    Attributes:
        results: The list that the call would have returned.
    """

    results: list[dict[str, Any]]

    @staticmethod
    def check(results: list[dict[str, Any]]) -> None:
        """Raise RequestsFailed if any of these results ended early."""
        errors = [
            RequestFailed(
                str(reason.get("message") or "ended early"),
                prompt_index=result["meta_info"]["prompt_index"],
                err_type=reason.get("err_type"),
            )
            for result in results
            if (reason := result["meta_info"]["finish_reason"] or {}).get("type") == "abort"
        ]
        if errors:
            group = RequestsFailed(f"{len(errors)} of {len(results)} outputs ended early", errors)
            group.results = results
            raise group

    def derive(self, excs: Sequence[Any]) -> Any:  # a part of this group
        group = RequestsFailed(self.message, excs)
        group.results = self.results
        return group
