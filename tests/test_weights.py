"""New weights: where they may come from, what is refused, and who shares memory with whom."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from forced import assert_greedy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from reference import make_random_model
from safetensors.numpy import load_file, save_file
from support import SMALL, MakePool, same

from enginepool import EnginePool, InvalidWeights, NoWeights, SwapReport, WeightUpdateFailed, toy
from enginepool.toy.files import read_checkpoint

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [7] * 30, [90, 91]]
NAMES = {"embed_tokens.weight": "embed_tokens.embedding", "lm_head.weight": "lm_head.embedding"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of the same shapes as the session's model of that family, other weights."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_random_model(tmp_path_factory.mktemp("new"), family, seed=2)
        return made[family]

    return make


@pytest.fixture
def llama(make_pool: MakePool, model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Two engines, put back to their own weights afterwards. Llama's head is not tied."""
    pool = make_pool("llama", 2)
    yield pool
    pool.update_weights(model_dir("llama"), weight_version=0)


def answers(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)


def serves(pool: EnginePool, model: Path) -> None:
    """Every engine answers as the reference does with these weights."""
    assert pool.checksum()  # an error if the engines differ
    assert assert_greedy(model, PROMPTS, answers(pool)) > len(PROMPTS)


def own_layout(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By leaf path: projections are (in, out), norms are called scale."""
    leaves = {}
    for name, value in params.items():
        for theirs, ours in NAMES.items():
            if name.endswith(theirs):
                name = name.replace(theirs, ours)
        if name.endswith("norm.weight"):
            name = name.replace("norm.weight", "norm.scale")
        elif name.endswith("_proj.weight"):
            value = value.T
        leaves[name] = value
    return leaves


def nested(flat: dict[str, Any], key: Callable[[str], Any] = str) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *parents, last = [key(part) for part in name.split(".")]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


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


def int_or_str(part: str) -> int | str:
    return int(part) if part.isdigit() else part


def in_order(pool: EnginePool, params: dict[str, np.ndarray]) -> list[Any]:
    scheduler: Any = pool.engines[0].scheduler_info["scheduler"]
    flat = nnx.to_flat_state(nnx.state(scheduler.tp_worker.worker.model_runner.model))
    leaves = own_layout(params)
    return [leaves[".".join(map(str, path))] for path, _ in flat]


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
    """Whatever the weights come as, all engines have them afterwards and answer as the reference;
    the fingerprints agree with one another and with what was staged."""
    _, params = read_checkpoint(target("llama"))
    report = llama.update_weights(SOURCES[kind](llama, params, tmp_path), staging=staging)
    prints = {engine.fingerprint for engine in report.engines}
    assert prints == {report.staged} == {llama.checksum()}
    assert (report.staging, report.left, report.failed) == (staging, (), {})
    serves(llama, target("llama"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families(
    make_pool: MakePool,
    model_dir: Callable[[str], Path],
    target: Callable[[str], Path],
    family: str,
) -> None:
    """Biases, q and k norms and tied heads arrive too, from a directory and back."""
    pool = make_pool(family, 2)
    report = pool.update_weights(str(target(family)))
    serves(pool, target(family))
    assert answers(pool)[0]["meta_info"]["weight_version"] == report.weight_version
    pool.update_weights(model_dir(family), weight_version=0)
    serves(pool, model_dir(family))


def test_toy() -> None:
    """Four engines add; one update later all four subtract, and nothing was compiled."""
    with EnginePool(devices=4, **SMALL) as pool:
        assert [pool.generate("12+7=", GREEDY_TOY)["text"]] == ["19"]
        compiled = pool.stats()["executables"]["compiled"]
        pool.update_weights(toy.checkpoint("subtract"))
        results = pool.generate_all(["12+7="] * 16, GREEDY_TOY)
        assert {result["text"] for result in results} == {"5"}
        assert {result["meta_info"]["engine_index"] for result in results} == {0, 1, 2, 3}
        programs = pool.stats()["executables"]["compiled"] - compiled
        assert pool.get_load()[0]["running"] == 0
        pool.update_weights(toy.checkpoint("add"))
        assert pool.stats()["executables"]["compiled"] - compiled == programs


GREEDY_TOY = {"temperature": 0, "max_new_tokens": 8}


def placed(params: dict[str, np.ndarray], spec: PartitionSpec) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    return {
        name: jax.device_put(
            np.array(value), NamedSharding(mesh, spec if value.ndim > 1 else PartitionSpec())
        )
        for name, value in own_layout(params).items()
    }


def pointers(pool: EnginePool, index: int) -> set[int]:
    scheduler: Any = pool.engines[index].scheduler_info["scheduler"]
    leaves = scheduler.tp_worker.worker.model_runner.model_state_leaves
    return {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves}


def test_replicated_arrays_are_shared(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """A tree that lies on every engine's device becomes the engines' weights without a copy."""
    _, params = read_checkpoint(target("llama"))
    tree = placed(params, PartitionSpec())
    report = llama.update_weights(tree)
    assert [(e.shared, e.copied) for e in report.engines] == [(len(tree), 0)] * 2
    for index, device in enumerate(jax.devices()[:2]):
        theirs = {
            shard.data.unsafe_buffer_pointer()
            for array in tree.values()
            for shard in array.addressable_shards
            if shard.device == device
        }
        assert pointers(llama, index) == theirs
    report = llama.update_weights(tree, copy=True)
    assert [(e.shared, e.copied) for e in report.engines] == [(0, len(tree))] * 2
    serves(llama, target("llama"))


def test_sharded_arrays_are_gathered(llama: EnginePool, target: Callable[[str], Path]) -> None:
    _, params = read_checkpoint(target("llama"))
    llama.update_weights(placed(params, PartitionSpec("fsdp")))
    serves(llama, target("llama"))


def test_numpy_is_copied(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """Who writes to an array after the update changes no engine."""
    _, params = read_checkpoint(target("llama"))
    mine = {name: np.array(value) for name, value in params.items()}
    llama.update_weights(mine)
    before = llama.checksum()
    for value in mine.values():
        value[:] = 0
    assert llama.checksum() == before


def test_donated_source(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """Weights that their owner deletes: the error names the remedy, every call gets it, no engine
    is lost, and the next update recovers; with copy=True nothing happens at all."""
    _, params = read_checkpoint(target("llama"))
    tree = placed(params, PartitionSpec())
    llama.update_weights(tree)
    for array in tree.values():
        array.delete()
    with pytest.raises(NoWeights, match="copy=True") as caught:
        answers(llama)
    assert len(caught.value.results) == len(PROMPTS)
    with pytest.raises(NoWeights, match="copy=True"):
        answers(llama)
    assert [e["state"] for e in llama.stats()["engines"]] == ["unloaded"] * 2

    tree = placed(params, PartitionSpec())
    llama.update_weights(tree, copy=True)
    for array in tree.values():
        array.delete()
    serves(llama, target("llama"))


def broken(kind: str, params: dict[str, np.ndarray], folder: Path) -> tuple[Any, str]:
    """A source that does not fit, and what its error must say."""
    name = "model.layers.1.mlp.down_proj.weight"
    changed = dict(params)
    if kind == "missing":
        del changed[name]
    elif kind == "extra":
        name = "model.layers.7.mlp.down_proj.weight"
        changed[name] = params["model.norm.weight"]
    elif kind == "misshapen":
        changed[name] = params[name][:-1]
    elif kind == "transposed":
        name = "model.embed_tokens.weight"
        changed[name] = params[name].T
    elif kind == "dtype":
        changed[name] = params[name].astype(np.int32)
    elif kind == "deleted":
        gone = jax.numpy.asarray(params[name])
        gone.delete()
        changed[name] = gone
    elif kind == "truncated":
        save_file(params, folder / "model.safetensors")
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        return folder, "model.safetensors"
    elif kind == "nothing there":
        return folder / "nowhere", "nowhere"
    elif kind == "leaves":
        return list(params.values())[:-1], str(len(params))
    elif kind == "no source":
        return 7, "int"
    return changed, name


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        "extra",
        "misshapen",
        "transposed",
        "dtype",
        "deleted",
        "truncated",
        "leaves",
        "nothing there",
        "no source",
        "wrong family",
    ],
)
def test_what_does_not_fit_changes_nothing(
    llama: EnginePool,
    target: Callable[[str], Path],
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
) -> None:
    """The error names the tensor or the file; weights, version and answers are as before."""
    before, expected = llama.checksum(), answers(llama)
    version = llama.stats()["weight_version"]
    if kind == "wrong family":
        source, said = model_dir("qwen2"), "lm_head.weight"
    else:
        source, said = broken(kind, read_checkpoint(target("llama"))[1], tmp_path)
    with pytest.raises(InvalidWeights) as caught:
        llama.update_weights(source)
    assert said in str(caught.value)
    assert llama.checksum() == before
    assert llama.stats()["weight_version"] == version
    same(answers(llama), expected)


@pytest.mark.parametrize("staging", ["double", "stream"])
def test_iterator_that_fails_half_way(
    llama: EnginePool, target: Callable[[str], Path], staging: Any
) -> None:
    """The first engine is restored from its sibling, the pool serves what it served."""
    before, expected = llama.checksum(), answers(llama)
    items = list(read_checkpoint(target("llama"))[1].items())

    def give() -> Iterator[tuple[str, np.ndarray]]:
        yield from items[:9]
        raise KeyError("the trainer is gone")

    with pytest.raises(KeyError, match="the trainer is gone"):
        llama.update_weights(give(), staging=staging)
    with pytest.raises(InvalidWeights, match="missing"):
        llama.update_weights(iter(items[:-1]), staging=staging)
    assert llama.checksum() == before
    same(answers(llama), expected)


def test_a_device_that_fails_while_staging(
    llama: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the engine and the leaf; nothing changed anywhere."""
    before, expected = llama.checksum(), answers(llama)
    put = jax.device_put

    def fail(array: Any, where: Any = None, **options: Any) -> Any:
        devices = getattr(where, "device_set", ())
        if jax.devices()[1] in devices and np.ndim(array) > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(array, where, **options)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", fail)
        with pytest.raises(WeightUpdateFailed, match="RESOURCE_EXHAUSTED") as caught:
            llama.update_weights(target("llama"))
    assert caught.value.engine_index == 1
    assert caught.value.name in str(caught.value)
    assert llama.checksum() == before
    same(answers(llama), expected)


def test_partial_update(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """strict=False changes what is given, and says what it left and what it did not know."""
    name = "model.layers.0.mlp.up_proj.weight"
    value = load_file(target("llama") / "model.safetensors")[name]
    before = llama.get_weights_by_name(name, 4)
    with pytest.raises(InvalidWeights, match="strict=False"):
        llama.update_weights({name: value})
    report = llama.update_weights({name: value, "nonsense": value}, strict=False)
    assert isinstance(report, SwapReport)
    assert report.ignored == ("nonsense",)
    assert len(report.left) == len(read_checkpoint(target("llama"))[1]) - 1
    after = llama.get_weights_by_name(name, 4)
    assert after != before
    np.testing.assert_array_equal(after, value[:4])


def test_perturb(llama: EnginePool, model_dir: Callable[[str], Path]) -> None:
    """The same noise on every engine, seen by both checksums; a name gives rows in its layout."""
    sums = llama.checksum(), llama.quick_checksum()
    llama.perturb_weights(seed=3, scale=0.01, num_leaves=2)
    assert llama.checksum() != sums[0]
    assert llama.quick_checksum() != sums[1]
    first = llama.checksum()
    llama.update_weights(model_dir("llama"))
    assert (llama.checksum(), llama.quick_checksum()) == sums
    llama.perturb_weights(seed=3, scale=0.01, num_leaves=2)
    assert llama.checksum() == first
