"""Calls share the tokenizer fairly: a large call does not block a small one."""

import threading
from typing import Any

from enginepool import EnginePool
from enginepool.frontend.fair_lock import FairLock
from enginepool.frontend.tokenizer import Tokenizer
from tests.support.liveness import callers, until


class Slow:
    """The pool's tokenizer. Its first call waits for an event."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self.calls: list[list[str]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append(list(texts))
        if len(self.calls) == 1:
            self.entered.set()
            assert self.go.wait(60)
        return self._hf(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hf, name)


def test_a_small_call_does_not_wait_for_a_large_one(pool: EnginePool) -> None:
    """Texts of other calls are encoded before the rest of the large call. The ids are the same."""
    hf = pool.engines[0].tokenizer_manager.tokenizer
    large = ["ab" * 20_000] * 20
    expected = hf(large)["input_ids"]
    slow = Slow(hf)
    tokenizer = Tokenizer(slow)
    with callers(2) as threads:
        first = threads.submit(tokenizer.encode, large)
        assert slow.entered.wait(60)
        second = threads.submit(tokenizer.encode, ["1"])
        until(lambda: len(tokenizer.lock.waiting) == 1)
        slow.go.set()
        assert second.result() == hf(["1"])["input_ids"]
        assert first.result() == expected
    assert slow.calls.index(["1"]) == 1
    assert len(slow.calls) > 3
    assert sum(map(len, slow.calls)) == 21


def test_the_longest_wait_goes_first() -> None:
    lock, order = FairLock(), []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with callers(8) as threads, lock:
        for number in range(8):
            threads.submit(take, number)
            until(lambda: len(lock.waiting) == number + 1)  # noqa: B023
    assert order == list(range(8))
    with lock:  # the lock is free again
        pass
