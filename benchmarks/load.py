"""Engines that generate while something else is measured, and the time of their steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Self

from enginepool import EnginePool

_DEADLINE = 600.0
_PROMPTS = 10_000  # more than are ever answered
_NEW_TOKENS = 16  # few, so that a drain ends


class Load:
    """Greedy requests on every engine while the `with` block lasts.

    A step's time is the time between two tokens of a request, as its caller gets them.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None
        self._last: dict[int, tuple[int, float]] = {}
        self._tokens = 0
        self._gaps: dict[int, list[tuple[float, float]]] = {i: [] for i in range(len(pool.engines))}
        self._thread = threading.Thread(target=self._generate, name="benchmark-load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stopped = True
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def wait_for_steps(self, count: int) -> None:
        """Wait until every engine has taken so many more steps.

        Raises:
            TimeoutError: An engine did not take them.
        """
        with self._changed:
            before = {engine: len(gaps) for engine, gaps in self._gaps.items()}
            taken = self._changed.wait_for(
                lambda: (
                    self._ended
                    or all(len(gaps) >= before[i] + count for i, gaps in self._gaps.items())
                ),
                _DEADLINE,
            )
        if not taken:
            raise TimeoutError(f"an engine took no {count} steps in {_DEADLINE:.0f} s")

    def tokens(self) -> int:
        """How many tokens came so far."""
        return self._tokens

    def step_seconds(self, without: Sequence[tuple[float, float]]) -> dict[int, float]:
        """The median by engine, of steps that do not overlap these times."""
        return {
            engine: statistics.median(
                end - begin
                for begin, end in gaps
                if not any(begin < until and end > since for since, until in without)
            )
            for engine, gaps in self._gaps.items()
        }

    def _generate(self) -> None:
        prompts = [[1 + i % 200, 2 + i % 100, 3] for i in range(_PROMPTS)]
        params = {"temperature": 0.0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
        try:
            stream: Any = self._pool.stream(input_ids=prompts, sampling_params=params)
            with closing(stream) as chunks:
                for chunk in chunks:
                    self._note(chunk, time.perf_counter())
                    if self._stopped:
                        return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _note(self, chunk: dict[str, Any], now: float) -> None:
        tokens = len(chunk["output_ids"])
        earlier, since = self._last.get(chunk["index"], (0, 0.0))
        self._tokens += tokens - earlier
        with self._changed:
            if earlier and tokens == earlier + 1:
                self._gaps[chunk["meta_info"]["engine_index"]].append((since, now))
            self._changed.notify_all()
        self._last[chunk["index"]] = tokens, now
