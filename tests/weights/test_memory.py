"""How much memory new weights take, counted from live buffers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool
from enginepool.weights.leaves import EngineLeaves
from tests.support.forced import assert_greedy
from tests.support.layouts import PROMPTS, answers, leaves, placed, tensors
from tests.support.marks import slow
from tests.support.pools import SMALL, in_use


def test_a_shared_source_costs_nothing(
    model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """Random weights, a trainer's next to them, and from the update on the trainer's alone: in sets
    of weights 1, 2, 1, and so it stays while the trainer keeps its tree and when it drops it."""
    seen = []
    options = SMALL | {"load_format": "dummy"}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        answers(pool)
        seen.append(in_use(pool))
        tree = placed(leaves(target("qwen3")), PartitionSpec(), devices=2)
        seen.append(in_use(pool))
        report = pool.update_weights(tree)
        seen.append(in_use(pool))
        answers(pool)
        seen.append(in_use(pool))
        del tree
        seen.append(in_use(pool))
        results = answers(pool)
        pool.release_weights()
        rest = in_use(pool)
    one_set = 2 * report.nbytes
    assert [(size - rest) / one_set for size in seen] == [1, 2, 1, 1, 1]
    assert assert_greedy(target("qwen3"), PROMPTS, results) > len(PROMPTS)


def device_bytes(pool: EnginePool) -> dict[int, int]:
    return {entry["device"]: entry["bytes_in_use"] for entry in pool.stats()["memory"]["devices"]}


@contextmanager
def peaks(pool: EnginePool) -> Iterator[dict[int, int]]:
    """The most that was in use on each of the pool's devices, looked at after every placement or
    gathering and at every exchange of leaves."""
    gc.collect()
    most = device_bytes(pool)

    def look() -> None:
        for device, size in device_bytes(pool).items():
            most[device] = max(most[device], size)

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look()
            return result

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("device_put", "make_array_from_single_device_arrays"):
            patch.setattr(jax, name, looking(getattr(jax, name)))
        patch.setattr(EngineLeaves, "replace", looking(EngineLeaves.replace))
        yield most


def from_directory(model: Path) -> Any:
    return model


def from_iterator(model: Path) -> Any:
    """Tensors that lie on the first engine's device already, one at a time."""
    with_names = tensors(model)
    return ((name, jax.numpy.array(with_names.pop(name))) for name in list(with_names))


@pytest.mark.parametrize("source", [from_directory, *slow(from_iterator)])
def test_streaming_takes_one_set_and_a_leaf(
    llama: EnginePool,
    model_dir: Callable[[str], Path],
    target: Callable[[str], Path],
    source: Callable[[Path], Any],
) -> None:
    """On no device there is ever more than the weights and the largest tensor, at any moment of an
    update; two sets, as an update that does not stream takes them, would be seen."""
    largest = max(tensor.nbytes for tensor in tensors(target("llama")).values())
    for model in (model_dir("llama"), target("llama")):
        gc.collect()
        before = device_bytes(llama)
        with peaks(llama) as most:
            report = llama.update_weights(source(model), staging="stream")
        assert report.staging == "stream"
        assert max(most[device] - before[device] for device in before) == largest
        gc.collect()
        assert device_bytes(llama) == before
    with peaks(llama) as most:
        report = llama.update_weights(source(model_dir("llama")), staging="double")
    assert all(most[device] - before[device] >= report.nbytes for device in before)


@pytest.mark.parametrize("layout", [leaves, tensors], ids=["model's layout", "Hugging Face's"])
@pytest.mark.parametrize("devices", [4, *slow(2)])
def test_gathering_takes_a_leaf(
    llama: EnginePool,
    target: Callable[[str], Path],
    layout: Callable[[Path], Any],
    devices: int,
) -> None:
    """A source that is cut over the devices is gathered leaf by leaf: on no device is there more
    than, beside the trainer's part, a set and a leaf, or two sets and a leaf where it does not
    stream."""
    params = layout(target("llama"))
    largest = max(value.nbytes for value in params.values())
    tree = placed(params, PartitionSpec("fsdp"), devices=devices)
    llama.update_weights(tree, copy=True)
    gc.collect()
    before = device_bytes(llama)
    for staging, sets in (("stream", 0), ("double", 1)):
        with peaks(llama) as most:
            report = llama.update_weights(tree, staging=staging, copy=True)
        assert report.staging == staging
        more = [most[device] - before[device] for device in before]
        assert sets * report.nbytes <= max(more) <= sets * report.nbytes + largest
        assert max(more) > 0  # it was looked at while a gathered leaf was there
        gc.collect()
        assert device_bytes(llama) == before
