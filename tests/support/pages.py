"""README.md and other pages, as tests read them: code blocks, headings, links."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
)

_FENCE = re.compile(
    r"(?:^<!-- needs: (?P<needs>\w+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@dataclass(frozen=True)
class Block:
    """Code of a page.

    Attributes:
        line: The line of the page where the code begins.
        needs: A package that only some environments have, from a comment before the block.
    """

    language: str
    code: str
    line: int
    needs: str | None


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks in order, all or those of one language."""
    text = read(page)
    found = [
        Block(f["language"], f["code"], text[: f.start("code")].count("\n") + 1, f["needs"])
        for f in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def run(page: str, block: Block, names: dict[str, Any], instead: dict[str, str]) -> None:
    """Run a block with these names, and add its own to them.

    Args:
        instead: Texts of the block, each with the text that replaces it. The block must have each.
    """
    code = block.code
    for printed, used in instead.items():
        assert printed in code
        code = code.replace(printed, used)
    exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)


def anchors(page: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", read(page)), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(page: str) -> list[tuple[str, str]]:
    """The links to files and headings: each target, "" for the page itself, with its anchor."""
    return _LINK.findall(_FENCE.sub("", read(page)))
