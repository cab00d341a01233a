"""Callers of every kind: they wait, time out, leave, abort, or close their stream.

A call has copies of one prompt. Half of the prompts begin with a prefix that many share, so
engines answer from their prefix caches, as in RL.
"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio

from benchmarks.merges import LETTERS
from benchmarks.micro_pool import ADAPTERS, BAD_TOKEN, OUTPUT, PROMPT, SHARED
from benchmarks.soak_checks import SWAP
from benchmarks.span_checks import Finished
from enginepool import EnginePool, InvalidRequest
from tests.support.faults import Fault

_COPIES = 3
_FEW_PROMPTS = 32  # which are asked again and again
# Calls without finite numbers reset engines, so this share of them becomes patient calls.
_SELDOM = 0.7
_LONG = 160  # tokens: several chunks
# What models spell letter by letter. Their tokenizer writes it in half as many tokens.
_SHORTEST_STOP = 4
_SPELLED = re.compile(f"[{LETTERS}]{{{_SHORTEST_STOP},}}")
_RECENT = 200  # answers
_SHARED_PREFIX = list(range(1, SHARED + 1))
# Messages of finish reasons of requests that a swap or a pause ended.
_EXPECTED = (SWAP, "load_lora_adapter(mode='abort')", "pause_generation(mode='abort')")


@dataclass(frozen=True)
class Answer:
    """One result, and what its caller asked for.

    Attributes:
        may_end: Messages of finish reasons that its caller, a swap or a pause may have caused.
    """

    finished: Finished
    params: dict[str, Any]
    may_end: tuple[str, ...] = _EXPECTED


class Callers:
    """Make calls, on one event loop and on the main thread, and keep the answers.

    Attributes:
        calls: How many of each kind.
        not_finite: How many prompts ended because numbers were not finite. With `bad`, a few calls
            have such a prompt.
    """

    def __init__(self, pool: EnginePool, rng: random.Random, *, bad: bool) -> None:
        self._pool, self._random = pool, rng
        self.answers: list[Answer] = []
        self.violations: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.not_finite = 0
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "patient": self._patient,
            "timeout": self._timeout,
            "cancelled": self._cancelled,
            "stream closed": self._closed_stream,
            "aborted": self._aborted,
            "stop string": self._stopped,
        }
        if bad:
            self._kinds["not finite"] = self._not_finite
        self._prompts = [self._prompt() for _ in range(_FEW_PROMPTS)]

    async def call(self) -> None:
        """One call. Most are patient."""
        kind = "patient"
        if self._random.random() < 0.4:
            kind = self._random.choice(sorted(self._kinds))
        if kind == "not finite" and self._random.random() < _SELDOM:
            kind = "patient"
        self.calls[kind] += 1
        # If the tokenizer is broken, a stream raises its Fault.
        with suppress(Fault), self._unless_unloaded():
            await self._kinds[kind]()

    def call_from_this_thread(self) -> None:
        """A patient call without an event loop."""
        prompt, params = self.question()
        with self._unless_unloaded():
            results = self._pool.generate_all(**self._args([prompt], params))
            self._note(prompt, params, results, 1)

    @contextmanager
    def _unless_unloaded(self) -> Iterator[None]:
        """A call may name an adapter that is unloaded at this moment."""
        try:
            yield
        except InvalidRequest as error:
            if "no such adapter" not in str(error):
                raise
            self.calls["of an adapter that is unloaded"] += 1

    def _args(self, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        """Of a call, with an adapter or the base."""
        adapter = self._random.choice((None, *ADAPTERS))
        return {"input_ids": prompts, "sampling_params": params, "lora_path": adapter}

    def question(self) -> tuple[list[int], dict[str, Any]]:
        prompt = self._random.choice(self._prompts)
        if self._random.random() < 0.5:
            prompt = self._prompt()
        wanted = self._random.randint(8, OUTPUT)
        return prompt, {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}

    def _prompt(self) -> list[int]:
        longest = _LONG if self._random.random() < 0.15 else PROMPT
        own = [self._random.randrange(256) for _ in range(self._random.randint(1, longest))]
        return _SHARED_PREFIX + own if self._random.random() < 0.5 else own

    # The kinds

    async def _patient(self) -> None:
        prompt, params = self.question()
        await self._ask(prompt, params, self._random.randint(1, _COPIES))

    async def _ask(self, prompt: list[int], params: dict[str, Any], copies: int) -> None:
        results = await self._pool.async_generate_all(
            **self._args([prompt] * copies, params), return_logprob="stop" in params
        )
        self._note(prompt, params, results, copies)

    async def _timeout(self) -> None:
        prompt, params = self.question()
        seconds = self._random.uniform(0.01, 0.5)
        results = await self._pool.async_generate_all(
            **self._args([prompt] * _COPIES, params), timeout=seconds
        )
        self._note(
            prompt, params, results, _COPIES, f"not finished within timeout={seconds} seconds"
        )

    async def _cancelled(self) -> None:
        prompt, params = self.question()
        with anyio.move_on_after(self._random.uniform(0.0, 0.3)):
            results = await self._pool.async_generate_all(**self._args([prompt] * _COPIES, params))
            self._note(prompt, params, results, _COPIES)

    async def _closed_stream(self) -> None:
        prompt, params = self.question()
        read = self._random.randint(0, OUTPUT)
        stream: Any = self._pool.async_stream(**self._args([prompt], params))
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk["meta_info"]["finish_reason"] is not None:
                    self._note(prompt, params, [chunk], 1)
                    return
                read -= 1
                if read < 0:
                    return

    async def _aborted(self) -> None:
        prompt, params = self.question()
        after = self._random.randint(1, OUTPUT)
        chunk: dict[str, Any] = {}
        async for chunk in self._pool.async_stream(**self._args([prompt], params)):
            if len(chunk["output_ids"]) >= after:
                await self._pool.async_abort_request(chunk["meta_info"]["id"])
        self._note(prompt, params, [chunk], 1, "abort_request")

    async def _stopped(self) -> None:
        """A stop string from an earlier output, for the same prompt; its weights may be others."""
        prompt, params = self.question()
        known = [
            one for one in self.answers[-_RECENT:] if _SPELLED.search(one.finished.result["text"])
        ]
        if not known:
            await self._ask(prompt, params, 1)
            return
        one = self._random.choice(known)
        spelled = self._random.choice(_SPELLED.findall(one.finished.result["text"]))
        length = self._random.randint(_SHORTEST_STOP, len(spelled))
        start = self._random.randint(0, len(spelled) - length)
        params |= {"max_new_tokens": OUTPUT, "stop": [spelled[start : start + length]]}
        await self._ask(one.finished.prompt, params, self._random.randint(1, _COPIES))

    async def _not_finite(self) -> None:
        """A prompt that is bad in its middle, between two that are good."""
        prompt, params = self.question()
        bad = [*prompt[: len(prompt) // 2], BAD_TOKEN, *prompt[len(prompt) // 2 :]]
        first, result, last = await self._pool.async_generate_all(
            **self._args([prompt, bad, prompt], params)
        )
        self._note(prompt, params, [first, last], 2)
        reason = result["meta_info"]["finish_reason"]
        ended = reason.get("err_type") == "not_finite"
        self.not_finite += ended
        if result["output_ids"] or not (ended or reason.get("message") in _EXPECTED):
            self.violations.append(f"a prompt without finite numbers: {result}")

    def _note(
        self, prompt: list[int], params: dict[str, Any], results: list[Any], count: int, *ends: str
    ) -> None:
        if len(results) != count:
            self.violations.append(f"{count} prompts, {len(results)} results")
        for result in results:
            self.answers.append(Answer(Finished(prompt, result), params, (*_EXPECTED, *ends)))
