"""The content of chat messages, as a string or as text parts, whichever the chat template takes.

Clients send either. Most templates take strings only; given parts, some of them print the list or
drop it. `ChatTemplate` renders a probe to find out which form a template takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from enginepool.errors import InvalidRequest
from enginepool.values import described

Form = Literal["string", "parts", "either"]

_MARK = "enginepool-probe"


def check_messages(messages: Any, index: int | None = None) -> list[Mapping[str, Any]]:
    """Check that these are the text messages of one conversation, and return them as a list.

    Args:
        index: The conversation's index in its call.
    """
    if isinstance(messages, (str, Mapping)) or not hasattr(messages, "__iter__"):
        raise InvalidRequest(
            f"expected a list of messages, got {described(messages)}", prompt_index=index
        )
    messages = list(messages)
    if not messages:
        raise InvalidRequest("the conversation is empty", prompt_index=index)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest(
                f'messages[{number}]: expected {{"role": ..., "content": ...}}, '
                f"got {described(message)}",
                prompt_index=index,
            )
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if not _is_text(part):
                kind = part.get("type") if isinstance(part, Mapping) else None
                raise InvalidRequest(
                    f"messages[{number}]: a pool takes text only, as a string or as parts "
                    f'{{"type": "text", "text": ...}}; got a part '
                    + (f"of type {kind!r}" if kind not in (None, "text") else described(part)),
                    prompt_index=index,
                )
    return messages


class ChatTemplate:
    """The content form that one tokenizer's template takes. Thread-safe.

    Two threads may probe at once. They find the same.

    Args:
        hf: The Hugging Face tokenizer.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._forms: dict[tuple[str, str], Form] = {}

    def fit(
        self, messages: Sequence[Mapping[str, Any]], template: str | None = None
    ) -> list[dict[str, Any]]:
        """The messages with their content in the form that the template takes for their role.

        Where it takes strings only, parts are joined by spaces, as upstream joins them.

        Args:
            template: The template to render. None: the tokenizer's own.
        """
        fitted = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, (str, list, tuple)):
                form = self._form(str(message["role"]), template)
                content = _as_form(content, form)
            fitted.append({**message, **({"content": content} if "content" in message else {})})
        return fitted

    def _form(self, role: str, template: str | None) -> Form:
        key = (template or str(getattr(self._hf, "chat_template", None)), role)
        if key not in self._forms:
            string = self._probe(role, _MARK, template)
            parts = self._probe(role, [{"type": "text", "text": _MARK}], template)
            if _MARK in string:
                self._forms[key] = "either" if parts == string else "string"
            else:
                self._forms[key] = "parts" if _MARK in parts else "string"
        return self._forms[key]

    def _probe(self, role: str, content: Any, template: str | None) -> str:
        """A conversation with this content, rendered. Empty if the template does not take it."""
        turns = [{"role": role, "content": content}]
        if role != "user":
            other = {"role": "user", "content": _as_form("1", self._form("user", template))}
            turns.insert(1 if role == "system" else 0, other)
        options = {} if template is None else {"chat_template": template}
        try:
            return self._hf.apply_chat_template(turns, tokenize=False, **options)
        except Exception:  # a template is the checkpoint's own program and may raise anything
            return ""


def _as_form(content: Any, form: Form) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "parts" else content
    return " ".join(part["text"] for part in content) if form == "string" else list(content)


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )
