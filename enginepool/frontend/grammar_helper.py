"""The pool's side of the process that tries grammars."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from enginepool.dispatch.grammar import STACK_BYTES, TOO_MUCH_MEMORY, GrammarSource
from enginepool.errors import EnginePoolError

_LOOKS_MS = 20  # how often it checks that a caller still waits
_START_SECONDS = 120.0
# Wall seconds for each CPU second of a trial, because other processes use the cores too.
_WALL_PER_CPU_SECOND = 10


class Vocabulary(NamedTuple):
    """A tokenizer as llguidance takes it.

    Attributes:
        text: The tokenizer's JSON.
    """

    text: str
    size: int
    eos_token_id: int


class TrialEnded(Exception):
    """A grammar crashed the process or reached a limit."""


class TookTooLong(TrialEnded):
    """A grammar reached the limit of seconds."""


class NobodyWaits(Exception):
    """No caller waits for the grammar any more."""


class GrammarHelper:
    """Starts its process for the first grammar, and again after a grammar has crashed it.

    One thread uses it. Any thread may call `close`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        json_options: Mapping[str, Any],
        *,
        seconds: float,
        nice: int = 0,
    ) -> None:
        """
        Args:
            seconds: The CPU seconds that a grammar may take.
        """
        self._seconds = seconds
        self._begin = {
            "tokenizer": vocabulary.text,
            "size": vocabulary.size,
            "eos_token_id": vocabulary.eos_token_id,
            "json_options": dict(json_options),
            "seconds": seconds,
            "nice": nice,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def try_out(self, source: GrammarSource, gone: Callable[[], bool]) -> dict[str, Any]:
        """The answer of `grammar_trial.Trial`.

        Args:
            gone: Says whether all callers have left.

        Raises:
            TrialEnded: The process ended without an answer.
            NobodyWaits: All callers left before the answer.
        """
        try:
            process = self._process
            if process is None or process.poll() is not None:  # somebody may have killed it
                self.end()
                process = self._start()
            return _exchange(process, list(source), self._seconds * _WALL_PER_CPU_SECOND, gone)
        except BaseException as error:
            self.end()
            if isinstance(error, TookTooLong):
                raise TookTooLong(
                    f"it takes more than {self._seconds:g} s to compile and to find the allowed "
                    "tokens of a few steps; make it smaller"
                ) from None
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process, even if all callers leave: the next grammar needs it too."""
        # The child finds the same packages as this process.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-P", "-m", "enginepool.frontend.grammar_trial"]
        try:
            with self._lock:
                if self._closed:
                    raise NobodyWaits
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C at the terminal ends only the pool's process
                )
            for pipe in _pipes(process):
                os.set_blocking(pipe.fileno(), False)
            _exchange(process, self._begin, _START_SECONDS, lambda: self._closed)
        except (OSError, TrialEnded) as error:
            if self._closed:
                raise NobodyWaits from None
            raise EnginePoolError(
                f"structured output needs a process of its own, and {' '.join(command)!r} does "
                f"not start: {error}"
            ) from error
        return process

    def end(self) -> None:
        """End the process; the next grammar starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in _pipes(process):
                pipe.close()

    def close(self) -> None:
        """End the process for good.

        A thread that waits for an answer gets `TrialEnded`, or `NobodyWaits` during the start.
        """
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _exchange(
    process: subprocess.Popen[bytes], question: Any, seconds: float, gone: Callable[[], bool]
) -> dict[str, Any]:
    """Send one line of JSON and return the line that answers it."""
    to, back = (pipe.fileno() for pipe in _pipes(process))
    left = memoryview(json.dumps(question).encode() + b"\n")
    answer = bytearray()
    until = time.monotonic() + seconds
    poll = select.poll()
    poll.register(to, select.POLLOUT)
    poll.register(back, select.POLLIN)
    while not answer.endswith(b"\n"):
        if gone():
            raise NobodyWaits
        if time.monotonic() > until:
            raise TookTooLong
        for file, _ in poll.poll(_LOOKS_MS):
            try:
                if file == to:
                    left = left[os.write(to, left) :]
                    if not left:
                        poll.unregister(to)
                elif said := os.read(back, 1 << 20):
                    answer += said
                else:
                    raise BrokenPipeError
            except BrokenPipeError:
                raise _ended(process.wait()) from None
    return json.loads(answer)


def _ended(code: int) -> TrialEnded:
    """The error for a process that ended with this code."""
    if code == -signal.SIGPROF:
        return TookTooLong()
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return TrialEnded(
            f"the compiler's stack of {STACK_BYTES >> 20} MiB overflows; make its chains of rules, "
            "$ref, anyOf or items shorter"
        )
    if code in (-signal.SIGABRT, -signal.SIGKILL):
        return TrialEnded(TOO_MUCH_MEMORY)
    return TrialEnded(f"the compiler's process has ended with {code}")
