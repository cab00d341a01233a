"""Random faults, one after the other, for random engines."""

from __future__ import annotations

import collections
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

from enginepool import EnginePool
from tests.support import faults

# The pool's, in seconds. A step that hangs returns before or after it.
STEP_TIMEOUT = 2.0


class Injector:
    """Puts faults of every kind into engines, and counts them.

    Args:
        refusing: See `faults.refusing_devices`.
    """

    def __init__(self, pool: EnginePool, rng: random.Random, refusing: set[int]) -> None:
        self._pool, self._random, self._refusing = pool, rng, refusing
        self.counts: collections.Counter[str] = collections.Counter()
        self._kinds: dict[str, Callable[[int], Any]] = {
            "step raises": lambda i: faults.raise_in_step(pool, i, self._at()),
            "step raises SystemExit": lambda i: faults.raise_in_step(pool, i, 1, SystemExit(1)),
            "result lost": lambda i: faults.raise_after_step(pool, i, self._at()),
            "bookkeeping raises": lambda i: faults.raise_after_bookkeeping(pool, i, self._at()),
            "KV buffers deleted": lambda i: faults.delete_kv_cache(pool, i),
            "weight deleted": lambda i: faults.delete_leaf(pool, i),
            # No leaf of adapters: they are replaced at any time.
            "weight not finite": lambda i: faults.spoil_leaf(pool, i, leaf=0),
            "commit raises": lambda i: faults.raise_in_commit(pool, i),
            "device_put raises": self._refuse,
            "tokenizer raises": lambda _: faults.raise_in_decode(pool),
            "SIGINT": lambda _: os.kill(os.getpid(), signal.SIGINT),
            "step hangs": self._hang,
        }

    def inject(self) -> None:
        """Put one fault into one serving engine, if there is one."""
        kind = self._random.choice(sorted(self._kinds))
        self._put(kind, self._kinds[kind])

    def break_a_step(self, kind: str) -> None:
        """Let one of the next steps of a serving engine raise; count it as this kind."""
        self._put(kind, lambda i: faults.raise_in_step(self._pool, i, self._random.randint(1, 4)))

    def _put(self, kind: str, fault: Callable[[int], Any]) -> None:
        engines = self._pool.stats()["engines"]
        serving = [e["engine_index"] for e in engines if e["state"] == "serving"]
        if not serving:
            return
        try:
            fault(self._random.choice(serving))
        except (KeyError, AttributeError, IndexError):
            return  # the engine failed at this very moment and is taken apart
        self.counts[kind] += 1

    def _at(self) -> int:
        return self._random.randint(1, 12)

    def _refuse(self, engine_index: int) -> None:
        devices = self._pool.stats()["engines"][engine_index]["devices"]
        self._refusing.update(devices)

    def _hang(self, engine_index: int) -> None:
        let_go = faults.hang_in_step(self._pool, engine_index, self._at())
        threading.Timer(self._random.uniform(0.5, 3.0) * STEP_TIMEOUT, let_go.set).start()
