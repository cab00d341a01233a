"""Error messages for names that do not fit a model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_SHOWN = 8


def listed(names: Sequence[str], what: str = "name") -> str:
    """Names in an error: how many, and the first of them."""
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{len(names)} {what}{'s' * (len(names) != 1)}: {shown}" + (
        f" and {more} more" if more > 0 else ""
    )


def mismatch(subject: str, missing: Sequence[str], unknown: Sequence[str], *, part: bool) -> str:
    """The message for names that differ.

    Args:
        subject: What does not fit.
        missing: Names that the model needs and the source lacks.
        unknown: Names that the source has and the model lacks.
        part: Whether the user may have meant a partial update.
    """
    said = []
    if missing:
        said.append(f"missing {listed(missing)}")
    if unknown:
        said.append(f"unknown {listed(unknown)}")
    text = f"{subject} does not fit the model: {'; '.join(said)}"
    if prefix := _prefix(missing, unknown):
        return f"{text} (without the prefix {prefix!r}, the unknown names are the missing ones)"
    if prefix := _prefix(unknown, missing):
        return f"{text} (with the prefix {prefix!r}, the unknown names are missing ones)"
    if near := _nearest(missing, unknown):
        text += f" ({near[0]} is missing, {near[1]} is the nearest name that is there)"
    return text + (" (strict=False updates a part)" if part else "")


def _prefix(wanted: Sequence[str], given: Sequence[str]) -> str | None:
    """The prefix that a wrapper gave every name, such as `module.` or `_orig_mod.`."""
    if not wanted or not given:
        return None
    names = set(wanted)
    before = {name[: -len(one)] for name in given[:1] for one in names if name.endswith(one)}
    return next(
        (p for p in before if p and {n.removeprefix(p) for n in given if n.startswith(p)} >= names),
        None,
    )


def _nearest(missing: Sequence[str], unknown: Sequence[str]) -> tuple[str, str] | None:
    if not missing or not unknown:
        return None
    found = difflib.get_close_matches(missing[0], unknown, 1, 0.0)
    return (missing[0], found[0]) if found else None
