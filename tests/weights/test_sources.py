"""The sources that new weights may come from."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from enginepool import EnginePool, InvalidWeights
from tests.support.layouts import answers, leaves, own_layout, serves, tensors
from tests.support.pools import SMALL, MakePool, same
from tests.support.reference import bfloat16, make_random_model


def nested(flat: dict[str, Any], key: Callable[[str], Any] = str) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *parents, last = [key(part) for part in name.split(".")]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def int_or_str(part: str) -> int | str:
    return int(part) if part.isdigit() else part


def sharded_directory(folder: Path, params: dict[str, np.ndarray]) -> Path:
    names = list(params)
    for index, part in enumerate((names[::2], names[1::2])):
        file = folder / f"model-{index}.safetensors"
        save_file({name: np.ascontiguousarray(params[name]) for name in part}, file)
    return folder


def flax_tree(params: dict[str, np.ndarray]) -> dict[str, Any]:
    flat = {}
    for name, value in own_layout(params).items():
        if name == "lm_head.embedding":
            name, value = "lm_head.kernel", value.T
        elif name.endswith("_proj.weight"):
            name = name.replace(".weight", ".kernel")
        flat[name.replace(".layers.", ".layers_")] = jax.numpy.asarray(value)
    return {"params": nested(flat)}


def in_order(pool: EnginePool, params: dict[str, np.ndarray]) -> list[Any]:
    scheduler: Any = pool.engines[0].scheduler_info["scheduler"]
    flat = nnx.to_flat_state(nnx.state(scheduler.tp_worker.worker.model_runner.model))
    ours = own_layout(params)
    return [ours[".".join(map(str, path))] for path, _ in flat]


SOURCES: dict[str, Callable[[EnginePool, dict[str, np.ndarray], Path], Any]] = {
    "sharded directory": lambda pool, params, folder: sharded_directory(folder, params),
    "NumPy": lambda pool, params, folder: params,
    "JAX": lambda pool, params, folder: {k: jax.numpy.asarray(v) for k, v in params.items()},
    "iterator": lambda pool, params, folder: reversed(list(params.items())),
    "nnx.State": lambda pool, params, folder: nnx.State(nested(own_layout(params), int_or_str)),
    "paths": lambda pool, params, folder: own_layout(params),
    "leaves": lambda pool, params, folder: in_order(pool, params),
    "flax tree": lambda pool, params, folder: flax_tree(params),
}


@pytest.mark.parametrize(
    ("kind", "staging"),
    [(kind, "double") for kind in SOURCES]
    + [(kind, "stream") for kind in ("sharded directory", "iterator", "paths")],
)
def test_every_source(
    llama: EnginePool, target: Callable[[str], Path], tmp_path: Path, kind: str, staging: Any
) -> None:
    """For every form of weights, all engines have them afterwards and give the reference's
    answers. The fingerprints of engines and source are equal."""
    source = SOURCES[kind](llama, tensors(target("llama")), tmp_path)
    report = llama.update_weights(source, staging=staging)
    prints = {engine.fingerprint for engine in report.engines}
    assert prints == {report.staged} == {llama.checksum()}
    assert (report.staging, report.left, report.failed) == (staging, (), {})
    serves(llama, target("llama"))


@pytest.mark.parametrize("staging", ["double", "stream"])
def test_iterator_that_fails_half_way(
    llama: EnginePool, target: Callable[[str], Path], staging: Any
) -> None:
    """The first engine is restored from another one, and the pool keeps its weights."""
    before, expected = llama.checksum(), answers(llama)
    items = list(tensors(target("llama")).items())

    def give() -> Iterator[tuple[str, np.ndarray]]:
        yield from items[:9]
        raise KeyError("the trainer is gone")

    with pytest.raises(KeyError, match="the trainer is gone"):
        llama.update_weights(give(), staging=staging)
    with pytest.raises(InvalidWeights, match="missing"):
        llama.update_weights(iter(items[:-1]), staging=staging)
    assert llama.checksum() == before
    same(answers(llama), expected)


@pytest.mark.parametrize("part", ["self_attn.o_proj.weight", "mlp.up_proj.weight"])
def test_a_nested_dict_of_one_leaf(
    llama: EnginePool, target: Callable[[str], Path], part: str
) -> None:
    """Its name is a path, as in a nested dict of many, also if it could be a Hugging Face name."""
    path = f"model.layers.0.{part}"
    value = leaves(target("llama"))[path]
    llama.update_weights(nested({path: value}, int_or_str), strict=False)
    for worker in llama.runtime.workers:
        np.testing.assert_array_equal(np.asarray(worker.leaves[path]), value)


def test_layers_that_the_engines_do_not_load(tmp_path: Path) -> None:
    """A checkpoint may have them, at opening and in an update. A dict may not."""
    first, second = (
        make_random_model(tmp_path / str(seed), "llama", seed, num_layers=2) for seed in (1, 2)
    )
    options: dict[str, Any] = SMALL | {"model_layer_nums": 1, "warmup": "none"}
    with EnginePool(str(first), devices=1, **options) as pool:
        report = pool.update_weights(second)
        assert report.ignored
        assert all(name.startswith("model.layers.1.") for name in report.ignored)
        with EnginePool(str(second), devices=1, **options) as fresh:
            assert fresh.checksum() == report.staged
        with pytest.raises(InvalidWeights, match=r"unknown \d+ names: model\.layers\.1\."):
            pool.update_weights(tensors(first))


def twice(kind: str, params: dict[str, np.ndarray]) -> Any:
    """A source with the last norm twice."""
    name, norm = "model.norm.scale", params["model.norm.weight"]
    if kind == "paths":
        return {**nested(own_layout(params), int_or_str), tuple(name.split(".")): norm}
    if kind == "flax tree":
        return {**flax_tree(params), name: norm}
    items = list(params.items())
    return iter([*items, *items[-2:]])


@pytest.mark.parametrize("kind", ["paths", "flax tree", "iterator"])
def test_a_leaf_that_comes_twice(
    llama: EnginePool, target: Callable[[str], Path], kind: str
) -> None:
    """The source does not say which of the two is meant. Nothing changes."""
    before = llama.checksum()
    with pytest.raises(InvalidWeights, match="twice") as caught:
        llama.update_weights(twice(kind, tensors(target("llama"))))
    assert caught.value.names
    assert llama.checksum() == before


def test_iterator_that_gives_nothing(
    llama: EnginePool, make_pool: MakePool, target: Callable[[str], Path]
) -> None:
    """No leaf has changed, so a pool of one engine keeps its weights, too."""
    array = tensors(target("llama"))["model.norm.weight"]

    def fails() -> Iterator[tuple[str, np.ndarray]]:
        raise KeyError("the trainer is gone")
        yield

    for pool in (make_pool("llama", 1), llama):
        before, version = pool.checksum(), pool.stats()["weight_version"]
        for staging in ("stream", "double"):
            with pytest.raises(KeyError):
                pool.update_weights(fails(), staging=staging)
            with pytest.raises(InvalidWeights, match="unknown 1 name: nonsense"):
                pool.update_weights(iter([("nonsense", array)]), staging=staging)
            with pytest.raises(InvalidWeights, match=r"none of the names .* 1 name: nonsense"):
                pool.update_weights(iter([("nonsense", array)]), staging=staging, strict=False)
            with pytest.raises(InvalidWeights, match="the source is empty"):
                pool.update_weights(iter([]), staging=staging, strict=False)
        with pytest.raises(InvalidWeights, match="the source is empty"):
            pool.update_weights(nnx.State({}), strict=False)
        assert pool.checksum() == before
        assert pool.stats()["weight_version"] == version


class Tensor:
    """torch.Tensor as far as update_weights uses it. It cannot become a NumPy array in bfloat16,
    while it needs a gradient, or on another device. Here it has NumPy's bits."""

    def __init__(self, bits: np.ndarray, dtype: str, *left_to_do: str) -> None:
        self._bits, self.dtype, self._left_to_do = bits, dtype, set(left_to_do)

    def _without(self, what: str) -> "Tensor":
        return Tensor(self._bits, self.dtype, *(self._left_to_do - {what}))

    def detach(self) -> "Tensor":
        return self._without("detach")

    def cpu(self) -> "Tensor":
        return self._without("cpu")

    def contiguous(self) -> "Tensor":
        return Tensor(np.ascontiguousarray(self._bits), self.dtype, *self._left_to_do)

    def view(self, dtype: str) -> "Tensor":
        assert dtype == "torch.int16"
        return Tensor(self._bits.view(np.int16), dtype, *self._left_to_do)

    def numpy(self) -> np.ndarray:
        if self._left_to_do or self.dtype == "torch.bfloat16":
            raise TypeError(f"{self.dtype} {self._left_to_do}")
        return self._bits


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with tensors only. The real torch is not needed to accept them."""
    module = ModuleType("torch")
    module.Tensor, module.bfloat16, module.int16 = Tensor, "torch.bfloat16", "torch.int16"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_torch(llama: EnginePool, torch: ModuleType, tmp_path: Path) -> None:
    """Tensors of a training step, in bfloat16 and float32. Every bit arrives."""
    model = make_random_model(tmp_path, "llama", seed=4, dtype=bfloat16())
    source: dict[str, Any] = {}
    for name, value in tensors(model).items():
        assert value.dtype == ml_dtypes.bfloat16
        if name.endswith("proj.weight"):
            source[name] = Tensor(value.T.copy().T, "torch.bfloat16", "detach", "cpu")
        else:
            source[name] = Tensor(value.astype(np.float32), "torch.float32", "detach")
    llama.update_weights(source)
    by_torch = llama.checksum()
    serves(llama, model)
    llama.update_weights(model)
    assert llama.checksum() == by_torch
    llama.update_weights(source.items().__iter__(), staging="stream")
    assert llama.checksum() == by_torch


def test_hub_id(
    llama: EnginePool,
    target: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hub id means its snapshot in the hub's cache. An id that cannot be downloaded changes
    nothing."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--trained"
    shutil.copytree(target("llama"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    # HF_HUB_CACHE sets this before huggingface_hub is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    before = llama.checksum()
    with pytest.raises(InvalidWeights, match="someone/else"):
        llama.update_weights("someone/else")
    assert llama.checksum() == before
    llama.update_weights("someone/trained")
    serves(llama, target("llama"))
