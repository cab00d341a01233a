"""Tries grammars in a process of its own, without JAX and with limits.

    python -m enginepool.frontend.grammar_trial

reads questions from standard input and writes answers to standard output, until the input ends.
The compiler is native code. On some grammars it overflows its stack or uses all memory. Then this
process ends, and the pool's process does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from enginepool.dispatch.grammar import (
    ADDRESS_BYTES,
    MOST_BYTES,
    STACK_BYTES,
    TOO_MUCH_MEMORY,
    parser_limits,
)
from enginepool.frontend.schema_limits import check_schema
from enginepool.frontend.structural_tag import structural_tag_grammar

# The steps of a walk through a grammar, and the seconds that a mask may take.
_STEPS = 16
_LONGEST_MASK = 0.15
_USUAL_MASK = 0.003


class Trial:
    """Tries grammars one after the other, for one vocabulary."""

    def __init__(self, vocabulary: LLTokenizer, json_options: Any, seconds: float) -> None:
        self._vocabulary, self._json_options = vocabulary, json_options
        self._seconds = seconds

    def answer(self, kind: str, text: str) -> dict[str, Any]:
        """The grammar in llguidance's own form and its size in bytes, or an error."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)  # its signal ends the process
        try:
            before = _allocated()
            form = self._form(kind, text)
            start = LLMatcher(self._vocabulary, form, log_level=0, limits=parser_limits())
            self._walk(start)
            taken = _allocated() - before
            if taken > MOST_BYTES:
                raise ValueError(
                    f"it takes {taken >> 20} MiB: at most {MOST_BYTES >> 20} MiB are kept; make it "
                    "smaller"
                )
        except MemoryError:
            return {"error": TOO_MUCH_MEMORY}
        except BaseException as error:  # a panic in llguidance is not an Exception
            return {"error": str(error) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"form": form, "bytes": taken}

    def _form(self, kind: str, text: str) -> str:
        if kind == "json_schema":
            check_schema(json.loads(text))
            return LLMatcher.grammar_from_json_schema(text, defaults=self._json_options)
        if kind == "structural_tag":
            return structural_tag_grammar(json.loads(text), self._vocabulary)
        if kind == "regex":
            return grammar_from("regex", text)
        _check_embedded(text)
        return grammar_from("ebnf", text)

    def _walk(self, matcher: LLMatcher) -> None:
        """Take some steps of a random output, and measure its masks."""
        taken: list[float] = []
        rng = random.Random(0)
        for _ in range(_STEPS):
            began = time.thread_time()
            allowed = matcher.compute_bitmask()
            taken.append(time.thread_time() - began)
            if matcher.is_error():
                break
            token = _any_of(allowed, rng, but=self._vocabulary.eos_token)
            if token is None:
                if not taken[1:] and not any(allowed):
                    raise ValueError("no token of this vocabulary can begin an output")
                break
            began = time.thread_time()
            matcher.consume_token(token)
            taken[-1] += time.thread_time() - began
        if matcher.is_error() and len(taken) == 1:
            raise ValueError(matcher.get_error())
        # The first masks take longer: they fill llguidance's caches.
        usual = sorted(taken)[_STEPS // 2] if len(taken) == _STEPS else 0.0
        for mask, limit, what in (
            (max(taken), _LONGEST_MASK, "the slowest"),
            (usual, _USUAL_MASK, "the median"),
        ):
            if mask > limit:
                raise ValueError(
                    f"{what} of {len(taken)} steps takes {1000 * mask:.0f} ms to find the allowed "
                    f"tokens: at most {1000 * limit:.0f} ms, because other requests wait for it; "
                    "make its expressions shorter"
                )


def _any_of(allowed: bytes, rng: random.Random, *, but: int) -> int | None:
    """A random id that the mask allows. None if it allows only `but`."""
    cut = rng.randrange(len(allowed))
    for part, first in ((allowed[cut:], cut), (allowed, 0)):
        while rest := part.lstrip(b"\0"):
            place = first + len(part) - len(rest)
            for bit in range(8):
                if rest[0] >> bit & 1 and (token := 8 * place + bit) != but:
                    return token
            part, first = rest[1:], place + 1
    return None


def _check_embedded(lark: str) -> None:
    """Check the JSON schemas inside a Lark grammar."""
    end = 0
    for place in re.finditer(r"%json\s*", lark):
        if place.end() < end:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, place.end())
        except ValueError:  # llguidance has a better error for it
            continue
        check_schema(schema)


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _allocated() -> int:
    """The bytes that this process has allocated."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc: the largest size so far
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return grown if sys.platform == "darwin" else grown << 10
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def _serve() -> None:
    """Answer each line of JSON with a line of JSON. The first line has the vocabulary."""
    begin = json.loads(sys.stdin.buffer.readline() or "null")
    if begin is None:
        return
    os.nice(begin["nice"])
    vocabulary = LLTokenizer(
        begin.pop("tokenizer"), n_vocab=begin["size"], eos_token=begin["eos_token_id"]
    )
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set, or the platform has none
        most = _address_space() + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    trial = Trial(vocabulary, begin["json_options"], begin["seconds"])
    _say({})
    while question := sys.stdin.buffer.readline():
        _say(trial.answer(*json.loads(question)))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
