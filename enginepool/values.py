"""The values of callers: converted to plain Python, checked, and shown in errors."""

from __future__ import annotations

import difflib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from enginepool.errors import InvalidConfig, InvalidRequest

_SHOWN = 200
_quoting = ContextVar("enginepool_quoting", default=True)


class Unreadable:
    """Replaces an array that was deleted or donated, or is traced. Its repr says why."""

    def __init__(self, array: Any, error: Exception) -> None:
        self._text = f"<{type(array).__name__}: {' '.join(str(error).split())}>"

    def __repr__(self) -> str:
        return self._text


def plain(value: Any, depth: int = 4) -> Any:
    """Convert NumPy and JAX values to plain Python, also inside lists, tuples and sets."""
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not isinstance(value, type):
        try:
            value = value.tolist()
        except Exception as error:
            return Unreadable(value, error)
    if depth:  # a list may contain itself
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return kind(plain(item, depth - 1) for item in value)
    return value


def shown(value: Any) -> str:
    """The `repr` for an error message, shortened."""
    try:
        text = repr(value)
    except Exception as error:  # an integer of 5,000 digits has no repr
        text = f"<{type(value).__name__}: {error}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


@contextmanager
def nothing_quoted() -> Iterator[None]:
    """Inside the block, errors quote no prompts. A server needs this, because it logs errors."""
    before = _quoting.set(False)
    try:
        yield
    finally:
        _quoting.reset(before)


def described(value: Any) -> str:
    """`shown`, for values that may contain a prompt. Inside `nothing_quoted`, the type and size."""
    if _quoting.get() or value is None or isinstance(value, int | float):
        return shown(value)
    kind = type(value).__name__
    if isinstance(value, str):
        return f"<{kind} of {len(value)} characters>"
    if isinstance(value, (list, tuple, Mapping)):
        return f"<{kind} of {len(value)} entries>"
    return f"<{kind}>"


def did_you_mean(
    name: Any,
    known: Iterable[str],
    form: Callable[[str], str] = str,
    elsewhere: Mapping[str, str] | None = None,
) -> str:
    """The end of an error about an unknown name: the nearest known name, or an empty string.

    Args:
        form: Formats the suggested name.
        elsewhere: The names of other libraries, and what to use here.
    """
    known = list(known)
    if not isinstance(name, str):
        return ""
    if elsewhere and name in elsewhere:
        return f"; here it is {elsewhere[name]}"
    near = difflib.get_close_matches(name, known, n=1) or [
        each
        for each in known
        # Many names have one or two letters in common.
        if (name in each if len(name) > 2 else each.startswith(f"{name}_"))
    ]
    return f"; did you mean {form(near[0])}?" if near else ""


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """Parse the JSON object of an option of this name. None gives an empty object.

    Raises:
        InvalidConfig: It is no text, no JSON, or no object.
    """
    try:
        found = json.loads(text or "{}")
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"{name}={shown(text)}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{name}={shown(text)}: expected an object")
    return found


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flag(name: str, value: Any, default: bool = False) -> bool:
    """Check that a value is True or False. None means `default`."""
    value = plain(value)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={shown(value)}: expected True or False")
    return value


def seconds(
    name: str, value: Any, *, zero: bool = False, error: type[Exception] = InvalidRequest
) -> float | None:
    """Check a time in seconds. None means no limit."""
    value = plain(value)
    if value is None:
        return None
    low = 0 if zero else math.ulp(0.0)
    if not (is_number(value) and low <= value <= threading.TIMEOUT_MAX):
        least = "0 or more" if zero else "above 0"
        raise error(
            f"{name}={shown(value)}: expected a finite number of seconds, {least}, "
            "or None for no limit"
        )
    return float(value)
