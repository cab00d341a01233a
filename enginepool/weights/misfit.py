"""What is said of names that do not fit a model."""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.weights.sources import listed


def misfit(missing: Sequence[str], unknown: Sequence[str], *, part: bool) -> str:
    """The error's text.

    Args:
        missing: What the model wants and the source has not.
        unknown: What the source has and the model wants not.
        part: Whether an update of what does fit may have been meant.
    """
    said = []
    if missing:
        said.append(f"missing {listed(missing)}")
    if unknown:
        said.append(f"not of this model {listed(unknown)}")
    text = f"update_weights: the source does not fit the model: {'; '.join(said)}"
    if prefix := _prefix(missing, unknown):
        return f"{text} (without {prefix!r} before them, these are the missing ones)"
    return text + (" (strict=False updates a part)" if part else "")


def _prefix(missing: Sequence[str], unknown: Sequence[str]) -> str | None:
    """What a wrapper has put before every name, as `module.` or `_orig_mod.`."""
    if not missing or not unknown:
        return None
    wanted = set(missing)
    before = {name[: -len(one)] for name in unknown[:1] for one in wanted if name.endswith(one)}
    return next(
        (
            p
            for p in before
            if p and {n.removeprefix(p) for n in unknown if n.startswith(p)} >= wanted
        ),
        None,
    )
