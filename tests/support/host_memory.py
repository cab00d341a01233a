"""An array that the host hands to a device must not change until a program that reads it has run.

A CPU device reads the host's memory in place if it is aligned. An accelerator copies it later.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jaxlib import xla_client

from enginepool.engine.common_programs import OnAnyDevice
from enginepool.engine.device_wait import DeviceWait

# Arrays up to this size are compared as a whole. No array of a batch is larger.
_SMALL = 1 << 20


class HandedOver:
    """The arrays that one thread has handed over and that a device may still read.

    Attributes:
        changed: The arrays that were written too early: their first values then and now.
        seen: How many arrays were compared.
    """

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._results: dict[int, tuple[Any, int]] = {}  # how many were handed over before each
        self._done = 0
        self.changed: list[str] = []
        self.seen = 0

    def hand_over(self, array: Any) -> None:
        if isinstance(array, np.ndarray) and 0 < array.nbytes <= _SMALL:
            self._arrays.append((array, array.copy()))

    def launched(self, results: Any) -> None:
        count = self._done + len(self._arrays)
        for array in jax.tree.leaves(results):
            if isinstance(array, jax.Array):
                self._results[id(array)] = array, count

    def waited(self, result: Any) -> None:
        """A result is there, so no program reads arrays that were handed over before its launch."""
        known = self._results.get(id(result))
        if known is None:
            return
        self.look()
        read = known[1] - self._done
        del self._arrays[:read]
        self._done += read
        self._results = {key: one for key, one in self._results.items() if one[1] > known[1]}

    def look(self) -> None:
        for array, before in self._arrays:
            self.seen += 1
            if not np.array_equal(array, before, equal_nan=array.dtype.kind == "f"):
                places = np.nonzero((array != before).reshape(-1))[0][:4]
                was, now = before.reshape(-1)[places], array.reshape(-1)[places]
                self.changed.append(f"{array.dtype}{array.shape} at {places}: {was} is {now}")
                before[...] = array


@contextmanager
def watching() -> Iterator[dict[str, HandedOver]]:
    """By thread: the arrays that engines hand over inside the block."""
    by_thread: dict[str, HandedOver] = {}

    def mine() -> HandedOver | None:
        name = threading.current_thread().name
        return by_thread.setdefault(name, HandedOver()) if "-engine-" in name else None

    def put(aval: Any, sharding: Any, arrays: Any, *args: Any, **options: Any) -> Any:
        if (found := mine()) is not None:
            for array in arrays:
                found.hand_over(array)
        return original_put(aval, sharding, arrays, *args, **options)

    def call(self: Any, *args: Any) -> Any:
        if (found := mine()) is not None:
            for array in jax.tree.leaves(args):
                found.hand_over(array)
        results = original_call(self, *args)
        if found is not None:
            found.launched(results)
        return results

    def wait(self: Any, result: Any) -> None:
        original_wait(self, result)
        if (found := mine()) is not None:
            found.waited(result)

    original_put: Callable[..., Any] = xla_client.batched_device_put
    original_call, original_wait = OnAnyDevice.__call__, DeviceWait.until_ready
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_client, "batched_device_put", put)
        patch.setattr(OnAnyDevice, "__call__", call)
        patch.setattr(DeviceWait, "until_ready", wait)
        yield by_thread
    for found in by_thread.values():
        found.look()
