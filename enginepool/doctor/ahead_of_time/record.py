"""Compiles one program for a chip, and records what the compiler reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import jax

from enginepool.doctor.ahead_of_time.reads import read_in_any_case
from enginepool.engine.score_head import bucket_of

# Kinds of programs, by the names of the functions that upstream and the pool jit.
_STEPS = {
    "jitted_sampler": "sampler",
    "jitted_compute_logprobs": "logprobs",
    "top": "top_logprobs",
    "zeros": "kv_zeros",
}
# The programs of a change of weights: one for each kind of batch of leaves.
WEIGHTS = (
    *("fingerprint", "cast", "copy", "cut", "join", "gather", "convert", "tied_head"),
    "write_adapter",
)
FORWARD = ("decode", "steady", "prefill")
STEP = (*FORWARD, "begin", "tally", "sampler", "logprobs", "top_logprobs")
KINDS = (*STEP, "kv_zeros", *WEIGHTS)

_MIB = 2**20

# The donated arguments, if they are not only the KV cache.
_IN_PLACE = {
    "steady": "KV cache and state",
    "tally": "state",
    "write_adapter": "slots",
}


@dataclass
class Compiled:
    """A program as the compiler describes it. Sizes are in bytes on one chip.

    Attributes:
        kind: Its purpose: decode, prefill, sampler, …
        size: Its bucket, or the shape of its argument.
        lowering_seconds: CPU seconds of tracing and lowering.
        seconds: Wall seconds of compiling. Other work of the machine adds to them.
        cpu_seconds: CPU seconds of compiling.
        largest: The largest argument.
        temporaries: The memory beside arguments and results while it runs.
        donated: Arguments whose memory the results must take over: the KV cache, and the state that
            a steady step leaves to the next one.
        aliased: The part of `donated` that the results do take over.
        adapters: Bytes of adapters that it reads even if no request has one: XLA copies small
            leaves into fast memory ahead. A model of a few layers has small ones.
        error: Why it does not compile, or what else is wrong with it.
    """

    kind: str
    size: str
    lowering_seconds: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    arguments: int = 0
    largest: int = 0
    results: int = 0
    temporaries: int = 0
    code: int = 0
    donated: int = 0
    aliased: int = 0
    adapters: int = 0
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """Why a TPU would refuse it, or which promise it breaks."""
        if self.error is not None:
            return self.error
        if self.aliased < self.donated:
            what = _IN_PLACE.get(self.kind, "KV cache")
            return f"{self.donated - self.aliased:,} bytes of {what} are not written in place"
        if self.temporaries > self.allowed:
            return f"{self.temporaries:,} bytes of temporaries, {self.allowed:,} are documented"
        return None

    @property
    def allowed(self) -> float:
        """The most temporaries that CONTRIBUTING.md allows the pool's own programs. Upstream's
        programs may have as many as fit.
        """
        if self.kind == "top_logprobs":
            return self.arguments + _MIB  # a copy of the log-probabilities
        if self.kind == "gather":
            # A copy of the leaf. In int8, also the scales and errors of all outputs.
            return self.results + self.results // 16 + _MIB
        narrower = {"cast": 0.5, "convert": 0.9}.get(self.kind, 0)
        if self.results < self.arguments * narrower:  # it quantizes to int8
            matrix = self.largest // 2 if self.kind == "cast" else 0  # in the model's dtype
            return matrix + self.arguments // 16 + _MIB
        if self.kind in ("kv_zeros", *WEIGHTS):
            return _MIB
        return math.inf

    @property
    def verdict(self) -> str:
        if self.problem is None and self.adapters:
            return f"compiles; {self.adapters:,} bytes of adapters are read without need"
        return self.problem or "compiles"

    def line(self) -> str:
        """A line of progress."""
        return f"{self.kind} {self.size}: {self.seconds:.1f} s, {self.verdict}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "problem": self.problem}


class NotLowered(Exception):
    """Raised to leave a warm-up when a program cannot be lowered: its results are unknown."""


class Record:
    """Compiles each program that it gets once, and keeps the outcome.

    Args:
        kinds: The kinds to compile. None: all.
        said: A function that is called with each program when it is done.

    Attributes:
        listening: Whether programs count. Set when the engine is built: programs that made its
            arrays do not count.
        kv_bytes: The size of the engine's KV cache on one chip.
        adapter_specs: The leaves that hold adapters.
        warm: Whether the warm-up is over. From then on any new program is a mistake.
        steps: The number of steps since the warm-up.
        steady_steps: The number of these that were steady.
    """

    def __init__(
        self, kinds: Collection[str] | None, said: Callable[[Compiled], None] = lambda _: None
    ) -> None:
        self.programs: list[Compiled] = []
        self.listening = False
        self.kv_bytes = 0
        self.adapter_specs: list[jax.ShapeDtypeStruct] = []
        self.warm = False
        self.steps = 0
        self.steady_steps = 0
        self._kinds = kinds
        self._tell = said
        self._seen: set[tuple[str, str, int]] = set()

    def wants(self, kind: str) -> bool:
        return self._kinds is None or kind in self._kinds

    def compile(
        self, function: str, lowered: Any, args: tuple[Any, ...], lowering_seconds: float
    ) -> None:
        """Compile a program of the warm-up. A new program of a later step is a mistake."""
        if self.warm:
            late = "a step needs it, and the warm-up has not compiled it"
            self._keep(Compiled(*_described(function, args), lowering_seconds, error=late))
        elif self.listening:
            self.add(*_described(function, args), lowered, lowering_seconds)

    def not_lowered(self, function: str, args: tuple[Any, ...], error: Exception) -> None:
        self._keep(Compiled(*_described(function, args), error=_said(error)))
        raise NotLowered from error

    def add(self, kind: str, size: str, lowered: Any, lowering_seconds: float = 0.0) -> None:
        if not self.wants(kind):
            return
        # One bucket may have several programs; a program that comes again is not compiled again.
        key = (kind, size, hash(lowered.as_text()))
        if key in self._seen:
            return
        self._seen.add(key)
        state, kept = map(jax.tree.leaves, _to_take_over(kind, lowered))
        donated = sum(map(_nbytes, state))
        if kind in FORWARD:
            donated += self.kv_bytes
        largest = max(map(_nbytes, jax.tree.leaves(lowered.args_info)), default=0)
        program = Compiled(kind, size, lowering_seconds, largest=largest, donated=donated)
        if any(array.donated for array in kept):
            program.error = "it donates a buffer that the next step still needs"
        self._measure(program, lowered)
        self._keep(program)

    def _keep(self, program: Compiled) -> None:
        self.programs.append(program)
        self._tell(program)

    def _measure(self, program: Compiled, lowered: Any) -> None:
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            compiled = lowered.compile()
            memory = compiled.memory_analysis()
        except Exception as error:  # an error of the compiler is a result here
            program.error = _said(error)
            return
        finally:
            program.seconds = time.perf_counter() - started
            program.cpu_seconds = time.process_time() - cpu_started
        program.arguments = memory.argument_size_in_bytes
        program.results = memory.output_size_in_bytes
        program.temporaries = memory.temp_size_in_bytes
        program.code = memory.generated_code_size_in_bytes
        program.aliased = memory.alias_size_in_bytes
        if program.kind in FORWARD and self.adapter_specs:
            program.adapters = read_in_any_case(compiled.as_text(), self.adapter_specs)


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _to_take_over(kind: str, lowered: Any) -> tuple[Any, Any]:
    """The arguments that a program donates, without the KV cache, and its other arguments. Both are
    empty unless it is steady decode's (engine/steady/program.py), or loads an adapter."""
    if kind == "steady":
        (leaves, _, state, *others), _ = lowered.args_info
        return state, (leaves, others)
    if kind in ("tally", "write_adapter"):
        (state, *others), _ = lowered.args_info
        return state, others
    return (), ()


def _described(function: str, args: tuple[Any, ...]) -> tuple[str, str]:
    """The kind of a program and its bucket."""
    for arg in args:
        if hasattr(arg, "numbers"):  # steady decode's
            rows = arg.names.shape[0]
            if function == "step":
                return "steady", f"batch {rows}"
            if function == "first_tokens":
                return "sampler", f"batch {rows}"
            return "prefill", f"{bucket_of(args[-1], rows)} tokens, batch {rows}"
        mode = getattr(arg, "forward_mode", None)
        if mode is not None:
            tokens = arg.input_ids.shape[0]
            if mode.is_decode():
                return "decode", f"batch {tokens}"
            return "prefill", f"{tokens} tokens, batch {arg.seq_lens.shape[0]}"
    arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    # The largest: a sampler has a key of random numbers and its seeds before the logits.
    shape = max(arrays, key=lambda array: array.size).shape if arrays else ()
    return _STEPS.get(function, function), "x".join(map(str, shape))


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
