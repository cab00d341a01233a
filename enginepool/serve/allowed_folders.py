"""Folders of this machine that clients may name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from enginepool.errors import InvalidRequest
from enginepool.lora.source import CONFIG, FILE
from enginepool.serve.error_replies import Refused

_LONGEST_NAME = 255  # characters; no file system has longer ones


def folder_below(roots: Mapping[str, Path], field: str, given: str) -> str | None:
    """The resolved folder below one of the roots; None if there is no such folder.

    Args:
        roots: Resolved folders by the option that names each.
        field: The name of what was given.

    Raises:
        Refused: It is outside of all of them.
        InvalidRequest: It is no path.
    """
    inside = False
    for root in roots.values():
        try:
            path = Path(root, given).resolve()
            found = path.is_dir()
        except (OSError, ValueError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"{field}={given!r}: {why}") from None
        if path.is_relative_to(root):
            if found:
                return str(path)
            inside = True
    if inside:
        return None
    told = " and ".join(f"{option} {root}" for option, root in roots.items())
    raise Refused(403, f"{field}={given!r} is outside of {told}")


def adapter_folder(root: Path, name: str) -> Path | None:
    """The folder of this name, directly in `root`, that has an adapter's configuration.

    None for a name that is a path or hidden, and if a link leads out of `root`.
    """
    if name.startswith(".") or "/" in name or len(name) > _LONGEST_NAME or not name.isprintable():
        return None
    folder = root / name
    try:
        files = [(folder / CONFIG).resolve(strict=True), (folder / FILE).resolve()]
    except (OSError, RuntimeError):
        return None
    return folder.resolve() if all(file.is_relative_to(root) for file in files) else None
