"""A stop string ends a request as soon as the text has it, in however many tokens.

What breaks: A model may spell a stop string in more tokens than the tokenizer does. Then it is
missed, and the output goes on. One that is complete with the last token of `max_new_tokens` is
reported as "length".

Why: `Req._check_str_based_finish` decodes only the last tokens: as many as the tokenizer makes of
the longest stop string, and one more. `Req.check_finished` looks at the length first and returns.

What we change: A request with stop strings keeps the end of its text, in which a stop string may
have begun. Each token is decoded once, after the tokens that its text depends on. Bytes of an
incomplete character wait for the rest. The text with special tokens is searched, and also the text
without them if the caller gets that. The stop string that is complete first counts. If several end
at the same character, the longest counts. The outputs that a resumed request already has are not
searched, except for a stop string that their last token completes. Upstream does the same with stop
ids: it looks at the last token only.

Remove when: Upstream searches the text and not a number of tokens.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from patches._lookup import module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.managers.schedule_batch"
_REPLACEMENT = "\ufffd"
# _CHARACTER: the most bytes of a UTF-8 character. _CONTEXT: a token's text may depend on this many
# tokens before it. _INCOMPLETE: this many tokens may wait for the rest of a character. If more do,
# those that no later token can complete are settled.
_CHARACTER, _CONTEXT, _INCOMPLETE = 4, 5, 8
_STATE = "_text_for_stops"


def _is_needed(original, _) -> bool:
    """Look for a string of one token in a text that spells it in four."""
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(stop_strs=["stop"], stop_str_max_len=1),
        tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))),
        output_ids=[ord(letter) for letter in "a stop"],
        decoded_text="",
        finished_reason=None,
    )
    return not original(req)


class _Text:
    """The end of a text that grows."""

    def __init__(self, decode, stops, context, joined):
        """
        Args:
            context: Tokens before the text.
            joined: Whether a text is its tokens' bytes, joined. No token then depends on another.
        """
        self._decode, self._stops, self._joined = decode, stops, joined
        self._keep = max(map(len, stops)) - 1
        self._tail, self._searched = "", 0
        self._pending: tuple[int, ...] = ()
        self._settle(tuple(context))

    def skip(self, ids) -> None:
        """Take tokens without a search."""
        cut = len(ids)
        while cut and self._decode(ids[max(0, cut - _INCOMPLETE) : cut]).endswith(_REPLACEMENT):
            cut -= 1
        # Most tokens have a character at least.
        some = ids[max(0, cut - 4 * self._keep - 64) : cut]
        if some:
            self._tail = self._end_of(self._new_text(tuple(some)))
            self._settle(tuple(some))
        for token in ids[cut:]:
            self.push(token)

    def push(self, token: int) -> str | None:
        """The stop string that this token completes."""
        self._pending = pending = (*self._pending, token)
        new = self._new_text(pending)
        shown = self._tail + (complete := new.rstrip(_REPLACEMENT))
        matched = self._find(shown)
        self._searched = len(shown)
        if complete == new:
            self._tail = self._end_of(shown)
            self._settle(pending)
        elif len(pending) > _INCOMPLETE:
            self._settle_some(new)
        return matched

    def _find(self, text: str) -> str | None:
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), -len(stop), stop))
        return min(found)[2] if found else None

    def _new_text(self, ids: tuple[int, ...]) -> str:
        text = self._decode([*self._context, *ids])
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode(list(ids))

    def _settle(self, ids: tuple[int, ...]) -> None:
        """Take these tokens as whole characters. The next tokens are decoded after them."""
        self._context = () if self._joined else ids[-_CONTEXT:]
        self._before = self._decode(list(self._context)) if self._context else ""
        self._searched, self._pending = len(self._tail), ()

    def _settle_some(self, new: str) -> None:
        """Settle the tokens whose characters no later token can complete."""
        pending = self._pending
        for last in range(_CHARACTER - 1, 0, -1):
            head, rest = pending[:-last], pending[-last:]
            first, second = self._decode(list(head)), self._decode(list(rest))
            if first + second == new:
                self._tail = self._end_of(self._tail + first)
                self._settle(head)
                self._pending = rest
                self._searched += len(second.rstrip(_REPLACEMENT))
                return

    def _end_of(self, text: str) -> str:
        return text[max(0, len(text) - self._keep) :] if self._keep else ""


class _Texts:
    """A request's text with special tokens, and without them if the caller does not get them."""

    def __init__(self, req):
        tokenizer, params = req.tokenizer, req.sampling_params
        spaces = params.spaces_between_special_tokens

        def decode(ids):
            return tokenizer.decode(
                ids, skip_special_tokens=False, spaces_between_special_tokens=spaces
            )

        backend = getattr(tokenizer, "backend_tokenizer", None)
        joined = "ByteLevel" in type(getattr(backend, "decoder", None)).__name__
        context = () if joined else req.origin_input_ids[-_CONTEXT:]
        self._whole = _Text(decode, params.stop_strs, context, joined)
        self._shown = None
        self._hidden = _special(tokenizer) if params.skip_special_tokens else frozenset()
        self.count = 0

    def look(self, ids) -> str | None:
        if not self.count and len(ids) > 1:
            self._skip(ids[:-1])
        for token in ids[self.count :]:
            self.count += 1
            matched = self._push(token)
            if matched is not None:
                return matched
        return None

    def _skip(self, ids) -> None:
        if not self._hidden.isdisjoint(ids):
            self._shown = copy.copy(self._whole)
            self._shown.skip([token for token in ids if token not in self._hidden])
        self._whole.skip(ids)
        self.count = len(ids)

    def _push(self, token: int) -> str | None:
        if token in self._hidden:
            if self._shown is None:
                self._shown = copy.copy(self._whole)
            return self._whole.push(token)
        matched = None if self._shown is None else self._shown.push(token)
        return self._whole.push(token) or matched


def _special(tokenizer) -> frozenset[int]:
    """The ids that `skip_special_tokens` leaves out."""
    if tokenizer not in _known_special:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {token_id for token_id, token in added.items() if token.special}
        _known_special[tokenizer] = frozenset(ids.union(getattr(tokenizer, "all_special_ids", ())))
    return _known_special[tokenizer]


# The special ids of each tokenizer, kept because it takes long to ask one.
_known_special: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def _replace_look(original):
    def check(self):
        if not self.sampling_params.stop_strs:
            return original(self)
        texts = getattr(self, _STATE, None)
        if texts is None or texts.count > len(self.output_ids):
            texts = _Texts(self)
            setattr(self, _STATE, texts)
        matched = texts.look(self.output_ids)
        if matched is None:
            return False
        self.finished_reason = module(_MODULE).FINISH_MATCHED_STR(matched=matched)
        return True

    return check


def _replace_finished(original):
    def check_finished(self, new_accepted_len=1):
        before = self.finished_reason
        original(self, new_accepted_len)
        reason = self.finished_reason
        if reason is not before and isinstance(reason, module(_MODULE).FINISH_LENGTH):
            self._check_str_based_finish()

    return check_finished


PATCH = Patch(
    name="stop_strings",
    issue="not reported",
    replaced=(
        Target(_MODULE, "Req._check_str_based_finish", _replace_look, ("self",)),
        Target(_MODULE, "Req.check_finished", _replace_finished, ("self", "new_accepted_len")),
    ),
    probe=_is_needed,
)
