"""A fuzz of half a minute."""

from benchmarks import fuzz


def test_nothing_is_wrong() -> None:
    assert fuzz.main(["--outputs", "150", "--page-size", "16"]) == 0
