"""What the README says of the code that can be checked, is."""

from pathlib import Path

import patches

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_patch_table_is_the_packages_own() -> None:
    """The README's table of patches is the output of `python -m patches --markdown`."""
    table = README.split("<!-- patches -->\n")[1].split("<!-- /patches -->")[0]
    assert table.strip() == patches.table(markdown=True, probe=False).strip()
