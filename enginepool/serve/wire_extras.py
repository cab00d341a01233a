"""Adds what vLLM's clients ask for to OpenAI's replies: token ids, prompts' log-probabilities,
sampling masks, experts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from enginepool.dispatch.request import Call, Request
from enginepool.frontend.routed_experts import EXPERTS, experts_file
from enginepool.frontend.sampling_mask import LOGPROBS, MASK, mask_entries, mask_rows

if TYPE_CHECKING:
    from enginepool.serve.openai_models import WireFields

_DATA, _DONE = "data: ", "data: [DONE]"
# This many log-probabilities are written in a few milliseconds.
_MANY_VALUES = 1 << 11


def takes_long(call: Call, outputs: Sequence[Any]) -> bool:
    """Whether outputs have so many values that they should be written on a thread."""
    first = call.requests[0]
    if first.scoring is not None or first.return_routed_experts:  # a prompt may be long
        return True
    tokens = sum(len(one["output_ids"]) for one in outputs) if first.return_logprob else 0
    values = tokens * (1 + first.top_logprobs_num + len(first.named_ids))
    if first.return_sampling_mask:
        values += sum(len(one["meta_info"][MASK]["ids"]) for one in outputs)
    return values >= _MANY_VALUES


def name_tokens(
    meta: dict[str, Any],
    kind: str,
    name: Callable[[int], str] | None,
    *,
    sampled_as_top: bool,
    since: int,
) -> None:
    """Put token names into log-probabilities, as upstream's classes expect them: in those of the
    sampled tokens, of the most probable ones, and of ids that were asked for.

    Args:
        kind: "input" or "output".
        sampled_as_top: Without top log-probabilities, the sampled token is listed in their place.
        since: The first place that is read.
    """
    each, top = f"{kind}_token_logprobs", f"{kind}_top_logprobs"
    meta.setdefault(top, [])
    if name is None:
        return

    def named(entries: Any) -> list[tuple[float | None, int, str]]:
        return [(value, token, name(token)) for value, token, _ in entries]

    meta[each][since:] = named(meta[each][since:])
    for lists in (top, f"{kind}_token_ids_logprobs"):
        if lists in meta:
            meta[lists][since:] = [
                None if place is None else named(place) for place in meta[lists][since:]
            ]
    if sampled_as_top and not meta[top]:
        new = [None if entry[0] is None else [entry] for entry in meta[each][since:]]
        meta[top] = [None] * since + new


def prompt_logprobs_of(
    request: Request, width: int, text: Callable[[int], str]
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: in each place the prompt's own token first, then the most probable ones."""
    scored = request.scored
    if scored is None:
        return None
    rows: list[dict[str, Any] | None] = []
    for place, (token, value) in enumerate(zip(request.input_ids, scored.logprobs, strict=True)):
        if value is None:  # the first, which follows nothing
            rows.append(None)
            continue
        top = scored.top_logprobs[place] if width else None
        best = [] if top is None else list(zip(*top, strict=True))[:width]
        ranks = {one: rank for rank, (_, one) in enumerate(best, 1)}
        values = {token: value, **{one: logprob for logprob, one in best}}
        rows.append(
            {
                str(one): {
                    "logprob": logprob,
                    "rank": ranks.get(one),
                    "decoded_token": text(one),
                }
                for one, logprob in values.items()
            }
        )
    return rows


def add_to_reply(
    made: dict[str, Any], call: Call, asked: WireFields, text: Callable[[int], str], *, chat: bool
) -> dict[str, Any]:
    """Add the fields that were asked for. A chat has one prompt, and its fields go into the reply.
    All other fields go into the choices."""
    width = asked.prompt_logprobs
    for choice, request in zip(made["choices"], call.requests, strict=True):
        place = made if chat else choice
        if asked.return_token_ids:
            choice["token_ids"] = request.output_ids
            place["prompt_token_ids"] = request.input_ids
        if asked.return_sampling_mask:
            entries = mask_entries(request.kept)
            choice["sampling_mask"] = mask_rows(entries[MASK])
            choice[LOGPROBS] = entries[LOGPROBS]
        if asked.return_routed_experts:
            choice[EXPERTS] = experts_file(request, asked.routed_experts_prompt_start)
        if width is not None and "prompt_logprobs" not in place:
            place["prompt_logprobs"] = prompt_logprobs_of(request, width, text)
    return made


class EchoedPrompts:
    """Puts the prompt before each text of a stream, and takes the prompt's log-probabilities out of
    all outputs but the first.

    Upstream's class puts the prompt before the first text only. From later texts it cuts as many
    characters as it has sent, those of the prompt included. As long as it has sent no text, it puts
    the prompt's log-probabilities into every chunk.

    Args:
        text: The prompt of an output.
    """

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self._texts: dict[int, str] = {}

    def observe(self, output: dict[str, Any]) -> None:
        index, meta = output["index"], output["meta_info"]
        if index not in self._texts:
            self._texts[index] = self._text(index)
        elif "output_token_logprobs" in meta:
            meta["input_token_logprobs"], meta["input_top_logprobs"] = [], []
        output["text"] = self._texts[index] + output["text"]


class StreamedIds:
    """Puts token ids into the chunks of a stream. Each id comes once, in the next chunk of its
    output."""

    def __init__(self, call: Call, *, chat: bool) -> None:
        self._call, self._chat = call, chat
        self._ids: dict[int, list[int]] = {}
        self._sent: dict[int, int] = {}

    def observe(self, output: dict[str, Any]) -> None:
        """Called with every output before upstream's class makes chunks of it."""
        self._ids[output["index"]] = output["output_ids"]

    async def with_fields(self, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for piece in pieces:
            if _is_chunk(piece):
                yield self._with_fields(json.loads(piece[len(_DATA) :]))
            else:
                yield piece

    def _with_fields(self, chunk: dict[str, Any]) -> str:
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            if index not in self._sent:
                prompt = self._call.requests[index].input_ids
                if not self._chat:
                    choice["prompt_token_ids"] = prompt
                elif not self._sent:
                    chunk["prompt_token_ids"] = prompt
            choice["token_ids"] = self._new(index)
        return _event(chunk)

    def _new(self, index: int) -> list[int]:
        ids = self._ids.get(index, [])
        new = ids[self._sent.get(index, 0) :]
        self._sent[index] = len(ids)
        return new


class UsageSoFar:
    """Puts the usage so far into every chunk of a stream: vLLM's `continuous_usage_stats`."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def observe(self, output: dict[str, Any]) -> None:
        meta = output["meta_info"]
        self._counts[output["index"]] = meta["prompt_tokens"], meta["completion_tokens"]

    async def with_fields(self, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for piece in pieces:
            chunk = json.loads(piece[len(_DATA) :]) if _is_chunk(piece) else {}
            for choice in chunk.get("choices", ()):
                prompt, completion = self._counts[choice["index"]]
                chunk["usage"] = {
                    "prompt_tokens": prompt,
                    "completion_tokens": completion,
                    "total_tokens": prompt + completion,
                }
            yield _event(chunk) if chunk.get("choices") else piece


def _is_chunk(piece: str) -> bool:
    return piece.startswith(_DATA) and not piece.startswith(_DONE)


def _event(chunk: dict[str, Any]) -> str:
    return f"{_DATA}{json.dumps(chunk)}\n\n"
