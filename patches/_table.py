"""The table of patches, for `python -m patches`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patches._patch import Patch


def table() -> str:
    """Return the table of all patches: name, targets, upstream issue, and whether needed here."""
    import patches

    head = ["patch", "target", "upstream issue", "needed here"]
    lines = [head, *(line for patch in patches.ALL for line in _lines(patch))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, ["-" * width for width in widths], *lines[1:]]
    )


def _lines(patch: Patch) -> list[list[str]]:
    """One line per target."""
    first, *others = [target.removeprefix("sgl_jax.srt.") for target in patch.targets]
    line = [patch.name, first, patch.issue, _answer(patch)]
    return [line, *(["", target, "", ""] for target in others)]


def _answer(patch: Patch) -> str:
    from patches._patch import PatchError

    try:
        return "yes" if patch.is_needed() else "no"
    except PatchError as exc:
        return f"unknown ({exc})"
