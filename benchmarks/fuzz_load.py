"""What a fuzz asks of a pool: the model, and calls of every kind. One seed makes a run."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.merges import LETTERS, VOCABULARY, write_speller
from benchmarks.micro_pool import ADAPTERS
from benchmarks.span_checks import Finished
from benchmarks.synthetic import micro_config, nano_config
from enginepool import EnginePool
from enginepool.toy.files import END_ID

# The tokenizer's end id, one of config.json's and two of generation_config.json's.
ENDS = {END_ID, 60, 61, 62}
_GRAMMARS: list[dict[str, str]] = [
    {"regex": "[a-h]{2,20}"},
    {"regex": "(ab|cd|ef)+g?"},
    {"ebnf": 'start: "a" /[b-f]+/ ("g" | "h")'},
    {"json_schema": '{"enum": ["abc", "fed", "hhhh"]}'},
    {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 5}'},
]
_CHOICES = (None, *ADAPTERS)
_SHARED = [97 + i % 7 for i in range(40)]
# Tokens of a prefill. Longer prompts are prefilled in chunks.
CHUNK = 256
_EARLY, _LATE = (9, 8, 110), (6, 33, 40)  # requests, tokens of a prompt, of an output
_GREEDY: dict[str, Any] = {"temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}


def fuzz_model(folder: Path, tp_size: int) -> Path:
    """A checkpoint of random weights that says letters more often than other bytes."""
    config = micro_config() if tp_size > 1 else nano_config()
    write_speller(folder, config | {"eos_token_id": [END_ID, 60]}, seed=1)
    generation = json.dumps({"eos_token_id": [61, 62]})
    (folder / "generation_config.json").write_text(generation, encoding="utf-8")
    return folder


class Questions:
    """Prompts and parameters at random."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._few = [self.new_prompt() for _ in range(6)]

    def prompt(self) -> list[int]:
        return self.random.choice(self._few) if self.random.random() < 0.3 else self.new_prompt()

    def new_prompt(self) -> list[int]:
        draw = self.random
        length = draw.randint(CHUNK, CHUNK + 60) if draw.random() < 0.04 else draw.randint(1, 48)
        own = self.text(length)
        return _SHARED + own if draw.random() < 0.3 else own

    def text(self, length: int) -> list[int]:
        return self.random.choices(range(32, 127), k=length)

    def params(self) -> dict[str, Any]:
        draw = self.random
        given: dict[str, Any] = {
            "max_new_tokens": draw.randint(1, 40),
            "temperature": draw.choice([0, 0, 0.4, 0.7, 1.0, 1.5]),
            "top_k": draw.choice([-1, -1, 1, 2, 5, 40]),
            "top_p": draw.choice([1.0, 1.0, 0.95, 0.6, 0.2]),
            "min_p": draw.choice([0.0, 0.0, 0.05, 0.3]),
            "no_stop_trim": draw.random() < 0.2,
            "skip_special_tokens": draw.random() < 0.8,
        }
        for name in ("frequency_penalty", "presence_penalty"):
            if draw.random() < 0.2:
                given[name] = round(draw.uniform(-1.5, 1.5), 2)
        if draw.random() < 0.5:
            given["sampling_seed"] = draw.randrange(2**31)
        if draw.random() < 0.3:
            given["stop"] = ["".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(2)]
        if draw.random() < 0.2:
            return given | draw.choice(_GRAMMARS)
        if draw.random() < 0.3:
            given["min_new_tokens"] = draw.randint(1, given["max_new_tokens"])
        if draw.random() < 0.3:
            given["stop_token_ids"] = draw.sample(range(32, 127), draw.choice([1, 3, 30]))
        given["ignore_eos"] = draw.random() < 0.2
        return given

    def options(self) -> dict[str, Any]:
        """Options of a call: its adapter, and the values that it asks for."""
        draw = self.random
        given: dict[str, Any] = {"return_logprob": True, **self.adapter()}
        if draw.random() < 0.3:
            given["top_logprobs_num"] = draw.randint(1, 20)
        if draw.random() < 0.2:
            given["token_ids_logprob"] = draw.sample(range(VOCABULARY), 5)
        if draw.random() < 0.2:
            given["return_sampling_mask"] = True
        return given

    def adapter(self) -> dict[str, Any]:
        return {"lora_path": self.random.choice(_CHOICES)}


@dataclass
class Asked:
    """An output that ended by itself, its parameters and its adapter."""

    finished: Finished
    params: dict[str, Any]
    adapter: str | None


class Load:
    """Calls of a pool from many threads, and their results.

    Attributes:
        scored: The scores. Each is kept as if its continuation were an output.
        faults: Results of one call that contradict each other.
        calls: How many of each kind.
        exceptions: How many calls raised an exception, by its message.
        resumed: How many outputs were resumed from a part.
    """

    def __init__(self, pool: EnginePool, seed: int) -> None:
        self._pool, self._seed = pool, seed
        self._lock = threading.Lock()
        self.asked: list[Asked] = []
        self.scored: list[Finished] = []
        self.faults: list[str] = []
        self.calls, self.exceptions = Counter[str](), Counter[str]()
        self.resumed = 0
        self._kinds: dict[str, Callable[[Questions], None]] = {
            "batch": self._batch,
            "stream": self._stream,
            "timeout": self._timeout,
            "aborted": self._aborted,
            "score": self._score,
            "stop in a known text": self._again,
        }

    def run(self, outputs: int, callers: int) -> None:
        """Ask until so many outputs have ended."""
        number = 0
        while len(self.asked) < outputs and not self.exceptions:
            if number % 4 == 0:
                self._call("join late", self._late, Questions(f"{self._seed} {number}"))
            with ThreadPoolExecutor(callers) as executor:
                for caller in range(4 * callers):
                    executor.submit(self._any_call, f"{self._seed} {number} {caller}")
            number += 1

    def _any_call(self, seed: str) -> None:
        questions = Questions(seed)
        kinds = ["batch"] * 4 + sorted(self._kinds)
        kind = questions.random.choice(kinds)
        time.sleep(questions.random.uniform(0, 0.1))
        self._call(kind, self._kinds[kind], questions)

    def _call(self, kind: str, ask: Callable[[Questions], None], questions: Questions) -> None:
        self.calls[kind] += 1
        try:
            ask(questions)
        except Exception as error:
            with self._lock:
                self.exceptions[f"{kind}: {type(error).__name__}: {str(error)[:200]}"] += 1

    def _note(
        self,
        prompt: list[int],
        params: Mapping[str, Any],
        result: dict[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        with self._lock:
            adapter = options.get("lora_path")
            self.asked.append(Asked(Finished(prompt, result), dict(params), adapter))

    # The kinds

    def _batch(self, questions: Questions) -> None:
        count, options = questions.random.randint(1, 4), questions.options()
        prompts = [questions.prompt() for _ in range(count)]
        params = [questions.params() for _ in range(count)]
        if questions.random.random() < 0.5:
            params = [params[0] | {"n": questions.random.randint(1, 3)}] * count
        self._ask(prompts, params, options)

    def _ask(
        self, prompts: list[list[int]], params: list[dict[str, Any]], options: dict[str, Any]
    ) -> list[Any]:
        results = self._pool.generate_all(input_ids=prompts, sampling_params=params, **options)
        for result in results:
            index = result["meta_info"]["prompt_index"]
            self._note(prompts[index], params[index], result, options)
        return results

    def _stream(self, questions: Questions) -> None:
        prompt, params, options = questions.prompt(), questions.params(), questions.options()
        chunk: dict[str, Any] = {"text": "", "output_ids": []}
        for new in self._pool.stream(input_ids=prompt, sampling_params=params, **options):
            count = len(chunk["output_ids"])
            if new["output_ids"][:count] != chunk["output_ids"]:
                self.faults.append(f"a stream changed ids: {chunk}, {new}")
            if not new["text"].startswith(chunk["text"]):
                self.faults.append(f"a stream changed its text: {chunk}, {new}, {params}")
            chunk = new
        self._note(prompt, params, chunk, options)

    def _timeout(self, questions: Questions) -> None:
        prompts = [questions.prompt() for _ in range(3)]
        params, options = questions.params(), questions.options()
        seconds = questions.random.uniform(0.01, 0.3)
        results = self._pool.generate_all(
            input_ids=prompts, sampling_params=params, timeout=seconds, **options
        )
        for prompt, result in zip(prompts, results, strict=True):
            self._go_on(prompt, params, result, options)

    def _aborted(self, questions: Questions) -> None:
        prompt, params, options = questions.prompt(), questions.params(), questions.options()
        after, chunk = questions.random.randint(1, 20), dict[str, Any]()
        for chunk in self._pool.stream(input_ids=prompt, sampling_params=params, **options):
            if len(chunk["output_ids"]) >= after:
                self._pool.abort_request(chunk["meta_info"]["id"])
        self._go_on(prompt, params, chunk, options)

    def _go_on(
        self, prompt: list[int], params: dict[str, Any], result: dict[str, Any], options: Any
    ) -> None:
        """Resume an output that a timeout or an abort ended."""
        meta = result["meta_info"]
        if meta["finish_reason"].get("err_type") in ("timeout", "cancelled"):
            self.resumed += bool(result["output_ids"])
            [result] = self._pool.generate_all(
                input_ids=[prompt],
                sampling_params=params,
                prompt_indices=[meta["prompt_index"]],
                sample_indices=[meta["sample_index"]],
                partial_outputs=[result if result["output_ids"] else None],
                **options,
            )
        self._note(prompt, params, result, options)

    def _score(self, questions: Questions) -> None:
        prompts = [questions.prompt() for _ in range(3)]
        scored = [questions.text(questions.random.randint(1, 60)) for _ in prompts]
        of = questions.adapter()
        results: Any = self._pool.score(input_ids=prompts, continuation_ids=scored, **of)
        with self._lock:
            for prompt, ids, result in zip(prompts, scored, results, strict=True):
                self.scored.append(Finished(prompt, result | {"output_ids": ids, "meta_info": of}))

    def _again(self, questions: Questions) -> None:
        """Ask a greedy prompt again, with a stop string from the middle of its text."""
        with self._lock:
            known = [one for one in self.asked[-200:] if not one.params["temperature"]]
        if not known:
            self._batch(questions)
            return
        one = questions.random.choice(known)
        text = one.finished.result["text"]
        start = questions.random.randrange(max(1, len(text)))
        stop = text[start : start + questions.random.randint(3, 10)].replace("\ufffd", "")
        params = one.params | {"stop": [stop or "a"], "n": 1}
        self._ask([one.finished.prompt], [params], questions.options() | {"lora_path": one.adapter})

    def _late(self, questions: Questions) -> None:
        """Short prompts with long outputs on every engine, then longer prompts beside them. The
        longer prompts fit one prefill step together; rounded up to whole pages they do not. Half of
        them have a partial output."""
        engines, of = len(self._pool.engines), questions.adapter()

        def ask(prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
            params = _GREEDY | {"ignore_eos": True, "max_new_tokens": tokens}
            return self._ask(prompts, [params] * len(prompts), {"return_logprob": True} | options)

        (early, short, runs), (late, long, lasts) = _EARLY, _LATE
        first = [questions.text(short) for _ in range(engines * early)]
        then = [questions.text(long) for _ in range(engines * late)]
        begun = [questions.text(long - 5) for _ in range(engines * late)]
        for prompts, given in ((then, None), (begun, ask(begun, 5, **of))):
            with ThreadPoolExecutor(1) as executor:
                running = executor.submit(ask, first, runs)
                time.sleep(0.08)
                ask(prompts, lasts, partial_outputs=given, **of)
                running.result()
