"""Turns an output's ids into text, on the caller's thread. A stop token or stop string at the end
is removed here.

Upstream finds that an output has reached a stop id or string (`finish_reason`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginepool.dispatch.request import Request
from enginepool.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 4  # in a character


def detokenize(
    request: Request, output_ids: Sequence[int], tokenizer: Tokenizer, *, final: bool = True
) -> str:
    """The text of an output so far.

    A stop token or string at its end is cut, as upstream does, unless `no_stop_trim` is set. While
    the request runs, the end of the text is held back if it may become a stop string or is an
    incomplete character. So each text of a stream continues the one before.
    """
    sampling, reason = _sampling(request), request.finish_reason or {}
    if not final:
        text = _decode_whole(request, output_ids, tokenizer)
        return _hold_back_stop(text, () if sampling.no_stop_trim else sampling.stop_strs or ())
    matched = None if sampling.no_stop_trim else reason.get("matched")
    if isinstance(matched, int) and output_ids and output_ids[-1] == matched:
        output_ids = output_ids[:-1]
    text = _decode(request, output_ids, tokenizer)
    if isinstance(matched, str):
        before = _decode_whole(request, output_ids[:-1], tokenizer)
        text = _cut_stop(text, matched, len(before), tokenizer)
    return text


def _cut_stop(text: str, stop: str, before: int, tokenizer: Tokenizer) -> str:
    """Cut a text at the stop string that its last token completed.

    Args:
        before: The length of the text without that token. A stop string within this text did not
            end the output.
    """
    if (start := text.find(stop, max(0, before - len(stop) + 1))) >= 0:
        return text[:start]
    for token in tokenizer.hf.added_tokens_decoder.values():
        if token.special:  # the text does not show special tokens
            stop = stop.replace(token.content, "")
    return text.removesuffix(stop)


def _decode_whole(request: Request, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text without an incomplete character at its end.

    With byte fallback, an incomplete character also hides complete characters before it. So ids
    are left out until it is gone.
    """
    text = _decode(request, output_ids, tokenizer)
    if tokenizer.decode_context:
        for left_out in range(1, min(_MOST_BYTES, len(output_ids) + 1)):
            if not text.endswith(_REPLACEMENT):
                return text
            text = _decode(request, output_ids[:-left_out], tokenizer)
    return text.rstrip(_REPLACEMENT)


def _decode(request: Request, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    sampling, hf = _sampling(request), tokenizer.hf
    options = {
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
    }
    for more in range(_MOST_BYTES if tokenizer.decode_context else 0):
        context = request.input_ids[-tokenizer.decode_context - more :]
        before = hf.decode(context, **options)
        if not before.startswith(_REPLACEMENT):  # else the context begins inside a character
            text = hf.decode([*context, *output_ids], **options)
            if text.startswith(before):
                return text[len(before) :]
            break
    return hf.decode(list(output_ids), **options)


def _sampling(request: Request) -> SamplingParams:
    assert request.sampling is not None, "a request that is only scored has no text"
    return request.sampling


def _hold_back_stop(text: str, stops: Sequence[str]) -> str:
    """Cut the end of a text if a stop string begins with it."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop), len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return text[: len(text) - longest] if longest else text
