"""Which files of a checkpoint are read, at opening and in a swap, and what happens if they
change."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginepool import EnginePool, InvalidConfig, InvalidWeights
from enginepool.weights import files
from enginepool.weights.checkpoint import Checkpoint
from patches._lookup import module
from tests.support import opening
from tests.support.checkpoints import (
    FAMILIES,
    FILE,
    INDEX,
    Tensors,
    make,
    set_config,
    shard,
    write_index,
)
from tests.support.layouts import GREEDY, PROMPTS, answers, serves, tensors
from tests.support.pools import SMALL, same
from tests.support.reference import make_random_model

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def wrong(folder: Path) -> Tensors:
    """The tensors of another checkpoint, under the same names."""
    return {name: value + 1 for name, value in tensors(folder).items()}


def with_index_beside_single(folder: Path, meant: Tensors) -> None:
    save_file(wrong(folder.parent / "plain"), folder / FILE)


def with_consolidated(folder: Path, meant: Tensors) -> None:
    save_file(wrong(folder.parent / "plain"), folder / "consolidated.safetensors")


def with_duplicates(folder: Path, meant: Tensors) -> None:
    """A tensor is in two files, and the index says which of them is right. It may name files of a
    folder."""
    last = folder / shard(2, 3)
    stored = load_file(last)
    save_file(stored | {EMBEDDING: meant[EMBEDDING] + 1}, last)
    (folder / "parts").mkdir()
    for file in folder.glob("*.safetensors"):
        file.rename(folder / "parts" / file.name)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, {name: f"parts/{file}" for name, file in where.items()})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stray", "shards"),
    [
        (with_index_beside_single, 3),
        (with_consolidated, 3),
        (with_consolidated, 1),
        (with_duplicates, 3),
    ],
)
def test_decided_by_index_or_name(
    tmp_path: Path, family: str, stray: Callable[[Path, Tensors], None], shards: int
) -> None:
    """An opened engine has the tensors of the index, or of model.safetensors. A swap reads the
    same files."""
    plain = opening.read(make(tmp_path / "plain", family))
    folder = make(tmp_path / "model", family, shards=shards)
    meant = tensors(tmp_path / "plain")
    stray(folder, meant)
    opening.same_leaves(opening.read(folder), plain)
    checkpoint = Checkpoint(folder)
    assert checkpoint.specs.keys() == meant.keys()
    for name, value in meant.items():
        np.testing.assert_array_equal(checkpoint.load(name), value)


def test_files_that_are_not_read_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path, "qwen3", shards=3, strays={"a.safetensors": {"x": np.ones(3)}})
    with caplog.at_level("WARNING", logger="enginepool"):
        Checkpoint(folder)
    (record,) = caplog.records
    assert record.getMessage() == "enginepool.files_not_read"


def files_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def test_several_files_without_an_index(tmp_path: Path) -> None:
    """All files are read if there is no model.safetensors."""
    plain = opening.read(make(tmp_path / "plain", "qwen3"))
    opening.same_leaves(
        opening.read(make(tmp_path / "many", "qwen3", shards=3, index=False)), plain
    )


def duplicated(folder: Path) -> None:
    files_without_index(folder)
    save_file(load_file(folder / shard(0, 3)), folder / "more.safetensors")


def moved(folder: Path) -> None:
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, where | {NORM: shard(0, 3)})


def named_only(folder: Path) -> None:
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, where | {"lm_head.weight": shard(0, 3)})


def numbered(folder: Path) -> None:
    files_without_index(folder)
    (folder / shard(1, 3)).unlink()


def truncated(folder: Path) -> None:
    file = folder / shard(1, 3)
    os.truncate(file, file.stat().st_size - 100)


def empty(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard gone": (
        lambda folder: (folder / shard(1, 3)).unlink(),
        r"model-00002-of-00003\.safetensors is missing; \S+index\.json names it for \d names",
    ),
    "a numbered file gone, no index": (
        numbered,
        r"missing 1 file: model-00002-of-00003\.safetensors",
    ),
    "in two files, no index": (
        duplicated,
        r"more\.safetensors: \S+ is also in model-00001-of-00003\.safetensors",
    ),
    "not where the index says": (
        moved,
        r"names model-00001-of-00003\.safetensors for model\.norm\.weight, and that file does not",
    ),
    "in the index alone": (named_only, r"for lm_head\.weight, and that file does not"),
    "an index that is none": (
        lambda folder: (folder / INDEX).write_text("[]"),
        r"index\.json: not an index",
    ),
    "an index of nothing": (lambda folder: write_index(folder, {}), r"index\.json: not an index"),
    "an index of numbers": (
        lambda folder: write_index(folder, {NORM: 3}),  # type: ignore[dict-item]
        r"index\.json: not an index",
    ),
    "truncated": (truncated, r"model-00002-of-00003\.safetensors: cannot be read"),
    "no safetensors": (
        lambda folder: (folder / shard(1, 3)).write_text("version https://git-lfs"),
        r"model-00002-of-00003\.safetensors: cannot be read",
    ),
    "empty": (empty, r"no \*\.safetensors in this directory"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken(tmp_path: Path, kind: str) -> None:
    """Opening and a swap raise the same error."""
    damage, says = BROKEN[kind]
    folder = make(tmp_path, "qwen3", shards=3)
    damage(folder)
    with pytest.raises(InvalidWeights, match=says):
        opening.read(folder)
    with pytest.raises(InvalidWeights, match=says):
        Checkpoint(folder)


class Reads:
    """Records which tensors are read, by upstream's loader and by ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.bytes = 0
        manager = module("sgl_jax.srt.utils.weight_utils").SequentialSafetensorManager
        original, preadv = manager.get_handle, os.preadv
        seen = self.names

        class Handle:
            def __init__(self, handle: Any) -> None:
                self.handle = handle

            def get_slice(self, name: str) -> Any:
                seen.append(name)
                return self.handle.get_slice(name)

            def get_tensor(self, name: str) -> Any:
                seen.append(name)
                return self.handle.get_tensor(name)

        def count(fd: int, buffers: Any, offset: int) -> int:
            done = preadv(fd, buffers, offset)
            self.bytes += done
            return done

        monkeypatch.setattr(manager, "get_handle", lambda self, file: Handle(original(self, file)))
        monkeypatch.setattr(files.os, "preadv", count)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_no_tensor_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The check reads headers only, and a few rows of a head beside a tied embedding."""
    tied = family == "qwen3"
    edit = with_head if tied else None
    folder = make(tmp_path, family, shards=2, edit=edit)
    reads = Reads(monkeypatch)
    opening.read(folder)
    stored = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert sorted(reads.names) == sorted(set(stored) - ({"lm_head.weight"} if tied else set()))
    assert reads.bytes == (2 * 32 * 256 * 4 if tied else 0)


def with_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors[EMBEDDING]}


def rewritten(file: Path) -> None:
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)


def replaced(file: Path) -> None:
    save_file(load_file(file), file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def test_nothing_is_read_for_a_configuration_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "llama", config={"mlp_bias": True})
    reads = Reads(monkeypatch)
    with pytest.raises(InvalidConfig, match="mlp_bias=True"):
        EnginePool(str(folder), devices=1, warmup="none", **SMALL).open()
    assert (reads.names, reads.bytes) == ([], 0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [rewritten, replaced, Path.unlink])
def test_a_file_changes_while_a_pool_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], when: str
) -> None:
    """Upstream opens files by name, one after the other. If one changes meanwhile, the pool does
    not open."""
    folder = make(tmp_path, "qwen3")
    loader = module("sgl_jax.srt.utils.weight_utils").WeightLoader
    original = loader.load_weights_from_safetensors

    def load(self: Any, mappings: Any) -> None:
        reading = len(mappings) > 1  # several leaves: the real reading, no trial of a shape
        if reading and when == "before":
            change(folder / FILE)
        original(self, mappings)
        if reading and when == "after":
            change(folder / FILE)

    monkeypatch.setattr(loader, "load_weights_from_safetensors", load)
    with pytest.raises(InvalidWeights, match=r"model\.safetensors: changed while it was read"):
        opening.read(folder)


@pytest.mark.parametrize("change", [rewritten, lambda file: os.truncate(file, 5000)])
def test_changed_while_a_swap_reads_it(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    """The same holds for a truncated file. A mapped file that is truncated would end the
    process."""
    checkpoint = Checkpoint(make(tmp_path, "qwen3"))
    change(tmp_path / FILE)
    with pytest.raises(InvalidWeights, match=r"model\.safetensors: changed while it was read"):
        dict(zip(checkpoint.specs, map(checkpoint.load, checkpoint.specs), strict=True))


@pytest.mark.parametrize("change", [replaced, Path.unlink])
def test_replaced_while_a_swap_reads_it(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    """The file that was opened is read to its end."""
    checkpoint = Checkpoint(make(tmp_path, "qwen3"))
    expected = tensors(tmp_path)
    change(tmp_path / FILE)
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.load(name), value)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnginePool, Path]]:
    """A pool on a checkpoint with stray files, and a plain checkpoint with the same weights."""
    folder = tmp_path_factory.mktemp("opened")
    plain = make_random_model(folder / "plain", "llama")
    stray = {"consolidated.safetensors": wrong(plain)}
    model = make(folder / "model", "llama", shards=3, strays=stray)
    with EnginePool(str(model), devices=2, warmup="none", **SMALL) as pool:
        yield pool, plain


def test_a_pool_serves_what_the_index_names(
    opened: tuple[EnginePool, Path], tmp_path: Path
) -> None:
    """A pool that opens with the checkpoint and a pool that is updated to it serve the index's
    tensors. Neither serves stray files."""
    pool, plain = opened
    serves(pool, plain)
    expected = answers(pool)
    other = make(tmp_path / "other", "llama", seed=3)
    pool.update_weights(other)
    serves(pool, other)
    pool.update_weights(Path(pool.config.model))
    same(answers(pool), expected)


def test_weights_of_another_model(opened: tuple[EnginePool, Path], tmp_path: Path) -> None:
    """Weights of the same shapes whose config.json differs are refused, with the field and both
    values, unless the caller allows it. A config.json that says the same in other words passes,
    and so does a missing one."""
    pool, plain = opened
    other = make(tmp_path / "other", "llama", seed=4)
    known = json.loads((other / "config.json").read_text())
    for fields, says in (
        ({"rope_theta": 77.0}, rf"rope_theta=77\.0 \(served: {known['rope_theta']}\)"),
        ({"rms_norm_eps": 0.5}, r"rms_norm_eps=0\.5 \(served: "),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(served: 'silu'\)"),
        ({"eos_token_id": 7}, r"eos_token_id=7 \(served: "),
    ):
        set_config(other, known | fields)
        for update in (pool.update_weights, pool.stage_weights):
            with pytest.raises(InvalidWeights, match=rf"config\.json does not fit .*{says}"):
                update(other)
        serves(pool, plain)
    pool.update_weights(other, strict=False)
    set_config(other, known | {"architectures": ["FSDPLlama"], "initializer_range": 9.0})
    for present in (True, False):
        pool.update_weights(plain)
        if not present:
            (other / "config.json").rename(tmp_path / "kept.json")
        pool.update_weights(other)
    (tmp_path / "kept.json").rename(other / "config.json")
    serves(pool, other)
    pool.update_weights(Path(pool.config.model))


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [folder, *folder.iterdir()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def test_swaps_change_nothing_in_the_directory(
    opened: tuple[EnginePool, Path], tmp_path: Path
) -> None:
    """Neither a swap nor the first engine of a pool writes to the directory."""
    pool, _ = opened
    other = make(tmp_path / "other", "llama", seed=5, shards=2)
    before = stamps(other)
    opening.read(other)
    pool.update_weights(other)
    pool.stage_weights(other).commit()
    assert stamps(other) == before
    pool.update_weights(Path(pool.config.model))


def test_opening_changes_nothing_in_the_directory(opened: tuple[EnginePool, Path]) -> None:
    """The directory may be read-only."""
    pool, _ = opened
    pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY)
    there = {path.name for path in Path(pool.config.model).iterdir()}
    known = {shard(i, 3) for i in range(3)} | {INDEX, "consolidated.safetensors", "config.json"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert there == known | tokenizer
