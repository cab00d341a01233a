"""The table of patches, for `python -m patches`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patches._patch import Patch


def table(*, markdown: bool = False, probe: bool = True) -> str:
    """Return the table of all patches: name, target, upstream issue, and whether needed here.

    Args:
        markdown: A Markdown table in place of aligned columns.
        probe: With the last column, which imports upstream.
    """
    import patches

    head = ["patch", "target", "upstream issue", *(["needed here"] if probe else [])]
    rows = [_row(patch, markdown, probe) for patch in patches.ALL]
    if markdown:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    # One line per target.
    lines = [head, *(line for row in rows for line in _lines(row))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, ["-" * width for width in widths], *lines[1:]]
    )


def _lines(row: list[str]) -> list[list[str]]:
    name, targets, *rest = row
    first, *others = targets.split(", ")
    return [[name, first, *rest], *(["", target, *[""] * len(rest)] for target in others)]


def _row(patch: Patch, markdown: bool, probe: bool) -> list[str]:
    targets = [target.removeprefix("sgl_jax.srt.") for target in patch.targets]
    if markdown:
        cells = [f"`{patch.name}`", ", ".join(f"`{target}`" for target in targets), patch.issue]
    else:
        cells = [patch.name, ", ".join(targets), patch.issue]
    return [*cells, _answer(patch)] if probe else cells


def _answer(patch: Patch) -> str:
    from patches._patch import PatchError

    try:
        return "yes" if patch.is_needed() else "no"
    except PatchError as exc:
        return f"unknown ({exc})"
