"""A hook of mkdocs.yml: makes pages of README.md and the other .md files at the root, and turns
links out of the site into plain text.

The site does not have the repository's other files, and their address is not decided.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:)([^)#\s]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked(text, PurePosixPath("."))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    generated = page.file.src_uri in PAGES.values()
    return markdown if generated else _linked(markdown, PurePosixPath("docs"))


def _linked(text: str, folder: PurePosixPath) -> str:
    """Turn the links in a text into links of the site. The text is of a file in this folder of the
    repository."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if not target:
            return found[0]
        path = _normal(folder / target)
        if path in PAGES:
            return f"[{words}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{anchor})"
        return words

    return LINK.sub(link, text)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
