"""Id 0 ends an output like any other id, whichever file names it."""

from pathlib import Path

import pytest

import patches
from patches import end_id_zero
from tests.support.end_ids import FILES, model_ends

PATCH = end_id_zero.PATCH


@pytest.mark.skipif(not PATCH.is_needed(), reason="upstream takes 0 for an end id itself")
@pytest.mark.parametrize("files", [(0, None), (None, 0), ([], None)])
def test_upstream_loses_it(tmp_path: Path, files: FILES) -> None:
    """It gives no ids, or something that is no set."""
    ends = model_ends(tmp_path, files)
    assert not isinstance(ends, set) or 0 not in ends


@pytest.mark.skipif(not PATCH.is_needed(), reason="upstream takes 0 for an end id itself")
@pytest.mark.parametrize("files", [(0, 1), (0, [1, 2]), ([], 1)])
def test_upstream_builds_no_engine(tmp_path: Path, files: FILES) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        model_ends(tmp_path, files)


@pytest.mark.parametrize("config", [None, 0, 1, [], [0], [0, 1], [1, 2]])
@pytest.mark.parametrize("generation", [None, 0, 3, [], [0], [0, 3], [3, 4]])
def test_every_combination(tmp_path: Path, config: object, generation: object) -> None:
    """With the patch, the ids of both files count."""
    patches.apply([PATCH])
    ends = model_ends(tmp_path, (config, generation))
    assert ends == {
        one
        for named in (config, generation)
        for one in ([] if named is None else [named] if isinstance(named, int) else named)
    }
