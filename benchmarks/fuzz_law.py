"""Checks that an output is possible under its parameters. The logits are those of a plain JAX
forward pass along the output. The rest is computed from them in NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from benchmarks.span_checks import NEAR_TIE, Finished

_NEAR = 1e-4  # the allowed difference of a log-probability in float32, at temperature 1
_REPLACEMENT = "\ufffd"
_NEVER = -1e30


class Law:
    """The outputs that one model may give.

    Args:
        model: The checkpoint.
        ends: The ids that end an output by themselves.
    """

    def __init__(self, model: Path, ends: set[int]) -> None:
        self.ends = ends
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = from_tokenizer(self.tokenizer, n_vocab=config["vocab_size"])

    def faults(
        self, finished: Finished, params: Mapping[str, Any], logits: np.ndarray | None = None
    ) -> list[str]:
        """What is wrong with an output.

        Args:
            logits: The reference's, by token of the output. None: its tokens are not checked.
        """
        output = _Output(self, finished, params)
        found = [*output.end(), *output.text(), *output.ids()]
        if logits is not None and not found:
            found += output.tokens(logits)
        return [f"{finished}, {dict(params)}: {text}" for text in found[:3]]


class _Output:
    def __init__(self, law: Law, finished: Finished, params: Mapping[str, Any]) -> None:
        self._law, self._finished, self._params = law, finished, params
        self._ids, self._reason = finished.output, finished.reason
        self._meta = finished.result["meta_info"]
        self._banned = law.ends | set(params.get("stop_token_ids") or ())
        self._stopping = set() if params.get("ignore_eos") else self._banned

    # Where it ends

    def end(self) -> Iterator[str]:
        ids, params, kind = self._ids, self._params, self._reason["type"]
        if kind == "abort":
            yield f"ended as {self._reason}"
            return
        early = [place for place, one in enumerate(ids[:-1]) if one in self._stopping]
        if early:
            yield f"continues after end id {ids[early[0]]} at {early[0]}"
        by_id = ids[-1] in self._stopping
        if (count := self._stopped[0]) is not None and count < len(ids):
            yield f"continues after a stop string, complete with token {count} of {len(ids)}"
        by_string = count == len(ids)
        if len(ids) > params["max_new_tokens"]:
            yield f"{len(ids)} tokens"
        elif len(ids) < params["max_new_tokens"] and not (by_id or by_string):
            yield f"ended without a reason after {len(ids)} tokens, as {self._reason}"
        if len(ids) < params.get("min_new_tokens", 0) and not by_string:
            yield f"only {len(ids)} tokens"
        if kind == "length" and (by_string or len(ids) != params["max_new_tokens"]):
            yield f"{len(ids)} tokens, and ended as {self._reason}"

    @cached_property
    def _stopped(self) -> tuple[int | None, str]:
        """After how many tokens a stop string is complete, and which one."""
        stops = self._params.get("stop") or []
        for count in range(1, len(self._ids) + 1) if stops else ():
            for skip in (True, False):
                if skip and not self._params.get("skip_special_tokens", True):
                    continue
                text = self._decode(self._ids[:count], skip).rstrip(_REPLACEMENT)
                if found := [stop for stop in stops if stop in text]:
                    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in found]
                    return count, min(ends)[2]
        return None, ""

    def text(self) -> Iterator[str]:
        ids, trims = self._ids, not self._params.get("no_stop_trim")
        count, stop = self._stopped
        by_id = self._reason["type"] == "stop" and isinstance(self._reason.get("matched"), int)
        if by_id and trims:
            ids = ids[:-1]
        text = self._decode(ids, self._params.get("skip_special_tokens", True))
        if count == len(self._ids) and not by_id and trims and stop in text:
            text = text[: text.index(stop)]
        if text != self._finished.result["text"]:
            yield f"says {self._finished.result['text']!r}, its ids {text!r}"

    def _decode(self, ids: list[int], skip: bool) -> str:
        return self._law.tokenizer.decode(ids, skip_special_tokens=skip)

    # Its tokens

    def ids(self) -> Iterator[str]:
        entries = self._meta.get("output_token_logprobs")
        given = self._ids if entries is None else [one for _, one, _ in entries]
        if given != self._ids or len(given) != self._meta["completion_tokens"]:
            yield "log-probabilities are of other ids"

    def tokens(self, logits: np.ndarray) -> Iterator[str]:
        ids, params = self._ids, self._params
        entries = self._meta["output_token_logprobs"]
        temperature = params["temperature"] or 1.0
        near = _NEAR / min(1.0, temperature)
        greedy = params["temperature"] == 0 or params["top_k"] == 1
        matcher, counts = self._matcher(), np.zeros(logits.shape[1])
        for place, (token, (value, *_)) in enumerate(zip(ids, entries, strict=True)):
            row = self._penalised(logits[place], counts, place)
            if matcher is not None:
                row = np.where(self._allowed(matcher, len(row)), row, -np.inf)
            law = _log_softmax(row / temperature)
            behind = row.max() - row[token]
            if not np.isfinite(law[token]):
                yield f"token {place} is {token}, which is forbidden"
                return
            if greedy and behind > NEAR_TIE:
                yield f"token {place} is {token}, {row.argmax()} is better by {behind:.4f}"
                return
            if not greedy and not self._in_support(law, token):
                yield f"token {place} is {token}, outside of what top-k, top-p, min-p leave"
                return
            if abs(value - law[token]) > near:
                yield f"token {place} has {value:.5f}, the reference {law[token]:.5f}"
                return
            wrong = self._wrong_lists(law, place, near) or self._wrong_mask(law, place, token)
            if wrong:
                yield wrong
                return
            counts[token] += 1
            if matcher is not None and token not in self._law.ends:
                matcher.consume_token(token)

    def _penalised(self, logits: np.ndarray, counts: np.ndarray, place: int) -> np.ndarray:
        params = self._params
        row = logits.astype(np.float64) - counts * params.get("frequency_penalty", 0.0)
        row -= (counts > 0) * params.get("presence_penalty", 0.0)
        if place < params.get("min_new_tokens", 0):
            row[sorted(self._banned)] = -np.inf
        return row

    def _matcher(self) -> LLMatcher | None:
        params = self._params
        defaults: Any = {"whitespace_flexible": True}
        if "json_schema" in params:
            grammar = LLMatcher.grammar_from_json_schema(params["json_schema"], defaults=defaults)
        elif "regex" in params:
            grammar = grammar_from("regex", params["regex"])
        elif "ebnf" in params:
            grammar = grammar_from("ebnf", params["ebnf"])
        else:
            return None
        return LLMatcher(self._law.vocabulary, grammar, log_level=0)

    def _allowed(self, matcher: LLMatcher, size: int) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = bits[:size].astype(bool)
        ends = sorted(self._law.ends)
        allowed[ends] = allowed[ends].any()
        return allowed

    def _in_support(self, law: np.ndarray, token: int) -> bool:
        """Whether top-k, top-p and min-p leave the token, one after the other."""
        order = np.argsort(-law, kind="stable")
        top_k = self._params["top_k"]
        if 0 < top_k < len(law):
            least = law[order[top_k - 1]]
            if law[token] < least - NEAR_TIE:
                return False
            law = np.where(law >= least, law, -np.inf)
            law[token] = max(law[token], least)
        probabilities = np.exp(law - law.max())
        probabilities /= probabilities.sum()
        before = probabilities[probabilities > probabilities[token] * (1 + NEAR_TIE)].sum()
        if before >= self._params["top_p"] + 1e-4:
            return False
        return probabilities[token] >= self._params["min_p"] * probabilities.max() * (1 - NEAR_TIE)

    def _wrong_lists(self, law: np.ndarray, place: int, near: float) -> str | None:
        """What is wrong with the log-probabilities of the best ids and of those that were named."""
        if "output_top_logprobs" in self._meta:
            top = [value for value, *_ in self._meta["output_top_logprobs"][place]]
            best = np.sort(law)[::-1][: len(top)]
            if not top or not np.allclose(top, best, rtol=1e-5, atol=near):
                return f"token {place} has {top} as most probable, the reference {best}"
        if "output_token_ids_logprobs" in self._meta:
            for value, one, _ in self._meta["output_token_ids_logprobs"][place]:
                wanted = law[one]
                same = np.isclose(value, wanted, rtol=1e-5, atol=near)
                if not (same or max(value, wanted) < _NEVER):
                    return f"token {place}: {value} for {one}, the reference {wanted}"
        return None

    def _wrong_mask(self, law: np.ndarray, place: int, token: int) -> str | None:
        """What is wrong with the ids that a token was sampled from."""
        if (mask := self._meta.get("output_sampling_mask")) is None:
            return None
        start, end = mask["indptr"][place : place + 2]
        listed = mask["ids"][start:end]
        alone = self._params["temperature"] == 0 or self._params["top_k"] == 1
        if alone or token not in (listed or [token]):
            return None if listed == [token] else f"token {place}, {token}, is from {listed}"
        for one in listed:
            if not (np.isfinite(law[one]) and self._in_support(law, one)):
                return f"token {place} may come from {one}, which is not left"
        return None


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())
