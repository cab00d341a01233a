"""Ids of an output to its text, once, off the engine threads; and where its stop cuts it.

That an output has come to a stop id or string is upstream's finding (`finish_reason`); what of it
is shown is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.dispatch.request import Request
from enginepool.frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 4  # of a character


def detokenize(
    request: Request, output_ids: Sequence[int], tokenizer: Tokenizer, *, final: bool = True
) -> str:
    """The text of an output so far.

    The stop token or string at its end is cut, as upstream does, unless `no_stop_trim`. While
    the request runs, a character whose bytes are not complete yet is held back, and so is what
    may become a stop string, so each text of a stream continues the one before.
    """
    sampling, reason = request.sampling, request.finish_reason or {}
    if not final:
        text = _decode_whole(request, output_ids, tokenizer)
        return _hold_back_stop(text, [] if sampling.no_stop_trim else sampling.stop_strs)
    matched = None if sampling.no_stop_trim else reason.get("matched")
    if isinstance(matched, int) and output_ids and output_ids[-1] == matched:
        output_ids = output_ids[:-1]
    text = _decode(request, output_ids, tokenizer)
    if isinstance(matched, str):
        before = _decode_whole(request, output_ids[:-1], tokenizer)
        text = _cut_stop(text, matched, len(before), tokenizer)
    return text


def _cut_stop(text: str, stop: str, before: int, tokenizer: Tokenizer) -> str:
    """Cut a text in which a stop string is complete behind so many characters. Earlier ones were
    given, and have ended nothing."""
    if (start := text.find(stop, max(0, before - len(stop) + 1))) >= 0:
        return text[:start]
    for token in tokenizer.hf.added_tokens_decoder.values():
        if token.special:  # the text does not show it
            stop = stop.replace(token.content, "")
    return text.removesuffix(stop)


def _decode_whole(request: Request, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text without a character at its end whose bytes are not complete.

    Where bytes are tokens beside the tokenizer's own (byte fallback), one that is not complete
    takes the whole ones before it from the text, so ids are left out until it is gone.
    """
    text = _decode(request, output_ids, tokenizer)
    if tokenizer.decode_context:
        for left_out in range(1, min(_MOST_BYTES, len(output_ids) + 1)):
            if not text.endswith(_REPLACEMENT):
                return text
            text = _decode(request, output_ids[:-left_out], tokenizer)
    return text.rstrip(_REPLACEMENT)


def _decode(request: Request, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    sampling, hf = request.sampling, tokenizer.hf
    options = {
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
    }
    for more in range(_MOST_BYTES if tokenizer.decode_context else 0):
        context = request.input_ids[-tokenizer.decode_context - more :]
        before = hf.decode(context, **options)
        if not before.startswith(_REPLACEMENT):  # else it begins within a character's bytes
            text = hf.decode([*context, *output_ids], **options)
            if text.startswith(before):
                return text[len(before) :]
            break
    return hf.decode(list(output_ids), **options)


def _hold_back_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a tail that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop), len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return text[: len(text) - longest] if longest else text
