"""What the README says of the code that can be checked, is."""

import re
from pathlib import Path

import pytest

import patches

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_patch_table_is_the_packages_own() -> None:
    """The README's table of patches is the output of `python -m patches --markdown`."""
    table = README.split("<!-- patches -->\n")[1].split("<!-- /patches -->")[0]
    assert table.strip() == patches.table(markdown=True, probe=False).strip()


@pytest.mark.parametrize("page", [str(p.relative_to(ROOT)) for p in PAGES])
def test_what_a_page_names_exists(page: str) -> None:
    """`room/file.py` is a file of the repository or of the package, and links lead somewhere."""
    text = (ROOT / page).read_text(encoding="utf-8")
    files = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*\.py)`", text)
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    homes = [ROOT, ROOT / "enginepool"]
    gone = [name for name in files if not any((home / name).exists() for home in homes)]
    gone += [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not gone
