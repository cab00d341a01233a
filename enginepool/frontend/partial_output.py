"""The part of an output that exists already, and reading it from the entry of `partial_outputs`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginepool.dispatch.routed_experts import RoutedTokens
from enginepool.dispatch.sampling_mask import Kept
from enginepool.errors import InvalidRequest
from enginepool.frontend.limits import Limits, check_ids
from enginepool.frontend.logprob_options import Logprobs
from enginepool.frontend.routed_experts import EXPERTS, read_experts
from enginepool.frontend.sampling_mask import LOGPROBS, MASK, read_mask
from enginepool.values import is_int, is_number, plain, shown

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class PartialOutput:
    """The tokens that one output has already. Its fields have the meaning that they have in
    `Request`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[list[float], list[int]]] = field(default_factory=list)
    named_logprobs: list[list[float]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    experts: RoutedTokens | None = None
    weight_versions: list[list[Any]] = field(default_factory=list)
    lora_versions: list[list[Any]] = field(default_factory=list)
    prompt_weight_versions: list[int | str] = field(default_factory=list)

    def for_a_request(self) -> dict[str, Any]:
        """The arguments of a `Request` that continues this output."""
        given = len(self.output_ids)
        return {
            "given": given,
            "retracted_at": given,
            "output_ids": list(self.output_ids),
            "logprobs": list(self.logprobs),
            "top_logprobs": list(self.top_logprobs),
            "named_logprobs": list(self.named_logprobs),
            "kept": list(self.kept),
            "experts": self.experts,
            "weight_versions": [list(span) for span in self.weight_versions],
            "lora_versions": [list(span) for span in self.lora_versions],
            "prompt_weight_versions": list(self.prompt_weight_versions),
        }


class Reading:
    """Reads one entry of `partial_outputs`: a result or a chunk, whole or in part."""

    def __init__(self, index: int, given: Any, logprobs: Logprobs) -> None:
        self._index, self._named_ids = index, logprobs.named_ids[index]
        self._sampling_mask, self._routed_experts = logprobs.sampling_mask, logprobs.routed_experts
        self._given: Mapping[str, Any] = {} if given is None else given
        self._needed = {
            "output_token_logprobs": "return_logprob=True" if logprobs.outputs else "",
            "output_top_logprobs": f"top_logprobs_num={logprobs.top}" if logprobs.top else "",
            "output_token_ids_logprobs": "token_ids_logprob" if self._named_ids else "",
        }

    def partial(self, limits: Limits, prompt_tokens: int) -> PartialOutput:
        meta = self._given.get("meta_info") if isinstance(self._given, Mapping) else self._given
        if not isinstance(meta, Mapping | None):
            raise self._refusal(
                f"{shown(self._given)}: expected a dict like a result, with output_ids, "
                "and output_token_logprobs in meta_info"
            )
        ids = plain(self._given.get("output_ids", []))
        if not (isinstance(ids, list | tuple) and all(map(is_int, ids))):
            raise self._refusal(f"output_ids {shown(ids)}: expected a list of token ids")
        if not ids:
            return PartialOutput()
        check_ids(ids, "the partial output", self._index, limits)
        meta = meta or {}
        return PartialOutput(
            list(ids),
            self._logprobs(meta, ids),
            self._top(meta, len(ids)),
            self._named(meta, len(ids)),
            self._kept(meta, len(ids)),
            self._experts(meta, prompt_tokens + len(ids) - 1, limits),
            self._spans(meta, "weight_versions", len(ids)),
            self._spans(meta, "lora_versions", len(ids)),
            self._versions(meta, "prompt_weight_versions"),
        )

    def _logprobs(self, meta: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
        entries = self._entries(meta, "output_token_logprobs", len(ids))
        if entries is None:
            return [0.0] * len(ids)  # engines need one value per id; no result shows these
        values = []
        for entry, token_id in zip(entries, ids, strict=True):
            value, of, *_ = (
                (*entry, None, None) if isinstance(entry, list | tuple) else (entry, None)
            )
            if of not in (None, token_id) or not (is_number(value) and abs(value) <= _LARGEST):
                raise self._refusal(
                    f"output_token_logprobs: {shown(entry)}: expected (logprob, {token_id}, None) "
                    "with a finite logprob"
                )
            values.append(float(value))
        return values

    def _top(self, meta: Mapping[str, Any], count: int) -> list[tuple[list[float], list[int]]]:
        rows = []
        for row in self._entries(meta, "output_top_logprobs", count) or ():
            if (pairs := _pairs(row)) is None:
                raise self._refusal(
                    f"output_top_logprobs: {shown(row)}: expected a list of (logprob, id, None)"
                )
            rows.append(pairs)
        return rows

    def _named(self, meta: Mapping[str, Any], count: int) -> list[list[float]]:
        if not self._named_ids:
            return []
        rows = []
        for row in self._entries(meta, "output_token_ids_logprobs", count) or ():
            pairs = _pairs(row)
            if pairs is None or pairs[1] != list(self._named_ids):
                raise self._refusal(
                    f"output_token_ids_logprobs: {shown(row)}: expected (logprob, id, None) of "
                    f"{shown(list(self._named_ids))} in this order"
                )
            rows.append(pairs[0])
        return rows

    def _kept(self, meta: Mapping[str, Any], count: int) -> list[Kept]:
        if not self._sampling_mask:
            return []
        try:
            return read_mask(meta, count)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise self._refusal(
                f"meta_info {MASK} {shown(meta.get(MASK))} with {LOGPROBS}: expected the "
                f"result's values for {count} output_ids, because of return_sampling_mask=True"
            ) from None

    def _experts(
        self, meta: Mapping[str, Any], positions: int, limits: Limits
    ) -> RoutedTokens | None:
        """The experts of the partial output. None if it has none: in a stream only the last chunk
        has them."""
        text = plain(meta.get(EXPERTS))
        if not (self._routed_experts and limits.routing) or text in (None, ""):
            return None
        try:
            return read_experts(text, limits.routing, positions)
        except (TypeError, ValueError):
            raise self._refusal(
                f"meta_info {EXPERTS} {shown(text)}: expected the result's value for "
                f"{positions} positions"
            ) from None

    def _entries(self, meta: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
        """One entry per id. None if there are none and the call needs none."""
        entries = plain(meta.get(name))
        if entries is None and not self._needed[name]:
            return None
        if not isinstance(entries, list | tuple) or len(entries) != count:
            have = len(entries) if isinstance(entries, list | tuple) else shown(entries)
            why = f", because of {self._needed[name]}" if self._needed[name] else ""
            raise self._refusal(
                f"meta_info {name}: {have}: expected one entry for each of {count} output_ids{why}"
            )
        return list(entries)

    def _spans(self, meta: Mapping[str, Any], name: str, count: int) -> list[list[Any]]:
        """The spans of the partial output's versions. Empty if it has none."""
        spans = plain(meta.get(name)) or []
        try:
            spans = [[start, end, version] for start, end, version in spans]
            bounds = [0, *(bound for span in spans for bound in span[:2])]
            # The last tokens may be the base's, without an adapter's version.
            least = 0 if name == "lora_versions" else count
            fits = not spans or (
                all(map(is_int, bounds))
                and all(isinstance(version, int | str) for *_, version in spans)
                and bounds == sorted(bounds)
                and least <= bounds[-1] <= count
            )
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise self._refusal(
                f"meta_info {name} {shown(spans)}: expected spans [start, end, version] "
                f"that end at {count}"
            )
        return spans

    def _versions(self, meta: Mapping[str, Any], name: str) -> list[int | str]:
        versions = plain(meta.get(name)) or []
        if not isinstance(versions, list | tuple) or not all(
            isinstance(version, int | str) for version in versions
        ):
            raise self._refusal(f"meta_info {name} {shown(versions)}: expected a list of versions")
        return list(versions)

    def _refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"partial_outputs: {what}", prompt_index=self._index)


def _pairs(row: Any) -> tuple[list[float], list[int]] | None:
    """The log-probabilities and the ids of a list of (logprob, id, None). None if it is none."""
    try:
        pairs = [(value, token_id) for value, token_id, *_ in row]
        if all(is_number(value) and is_int(token_id) for value, token_id in pairs):
            return [float(value) for value, _ in pairs], [token_id for _, token_id in pairs]
    except (TypeError, ValueError, OverflowError):
        pass
    return None
