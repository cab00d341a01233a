"""Where a source's arrays lie, and who shares memory with whom: four engines on four devices."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from layouts import PROMPTS, answers, leaves, placed, pointers, serves, tensors

from enginepool import EnginePool, NoWeights


def test_replicated_arrays_are_shared(four: EnginePool, target: Callable[[str], Path]) -> None:
    """A tree that lies on every engine's device becomes the engines' weights without a copy."""
    tree = placed(leaves(target("qwen3")), PartitionSpec())
    report = four.update_weights(tree)
    assert [(e.shared, e.copied) for e in report.engines] == [(len(tree), 0)] * 4
    for index, device in enumerate(jax.devices()):
        theirs = {
            shard.data.unsafe_buffer_pointer()
            for array in tree.values()
            for shard in array.addressable_shards
            if shard.device == device
        }
        assert len(theirs) == len(tree)
        assert pointers(four, index) == theirs
    serves(four, target("qwen3"))
    report = four.update_weights(tree, copy=True)
    assert [(e.shared, e.copied) for e in report.engines] == [(0, len(tree))] * 4
    serves(four, target("qwen3"))


@pytest.mark.parametrize("staging", ["double", "stream"])
@pytest.mark.parametrize("layout", [leaves, tensors], ids=["model's layout", "Hugging Face's"])
def test_sharded_arrays_are_gathered(
    four: EnginePool,
    target: Callable[[str], Path],
    layout: Callable[[Path], dict[str, np.ndarray]],
    staging: str,
) -> None:
    """A trainer's FSDP tree over all four devices, each of which has a quarter of every matrix."""
    tree = placed(layout(target("qwen3")), PartitionSpec("fsdp"))
    report = four.update_weights(tree, staging=staging)
    assert report.staging == staging
    assert {engine.fingerprint for engine in report.engines} == {report.staged}
    serves(four, target("qwen3"))


def test_arrays_on_one_device(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The engine of that device shares them, the others get copies."""
    tree = placed(leaves(target("qwen3")), PartitionSpec(), devices=1)
    report = four.update_weights(tree)
    assert [e.shared for e in report.engines] == [len(tree), 0, 0, 0]
    serves(four, target("qwen3"))


def test_numpy_is_copied(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Who writes to an array after the update changes no engine."""
    mine = {name: np.array(value) for name, value in tensors(target("qwen3")).items()}
    four.update_weights(mine)
    before = four.checksum()
    for value in mine.values():
        value[:] = 0
    assert four.checksum() == before


def test_donated_source(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Weights that their owner deletes: the error names the remedy, every call gets it, no engine
    is lost, and the next update recovers; with copy=True nothing happens at all."""
    tree = placed(leaves(target("qwen3")), PartitionSpec())
    four.update_weights(tree)
    for array in tree.values():
        array.delete()
    with pytest.raises(NoWeights, match="copy=True") as caught:
        answers(four)
    assert len(caught.value.results) == len(PROMPTS)
    with pytest.raises(NoWeights, match="copy=True"):
        answers(four)
    assert [e["state"] for e in four.stats()["engines"]] == ["unloaded"] * 4

    tree = placed(leaves(target("qwen3")), PartitionSpec())
    four.update_weights(tree, copy=True)
    for array in tree.values():
        array.delete()
    serves(four, target("qwen3"))
