"""The memory that new weights take, counted from live buffers."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool, WeightUpdateFailed
from enginepool.engine.kv_cache import KVCache
from enginepool.runtime import update
from enginepool.runtime.statistics import memory
from enginepool.weights import batches, conversion, parts
from enginepool.weights.leaves import EngineLeaves
from tests.runtime.test_swap_faults import broken_commit
from tests.support.faults import scheduler_of
from tests.support.forced import assert_greedy
from tests.support.layouts import PROMPTS, answers, leaves, placed, tensors
from tests.support.marks import slow
from tests.support.pools import SMALL, MakePool, in_use


def test_a_shared_source_costs_nothing(
    model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """Random weights, then a trainer's beside them, and after the update the trainer's only: 1,
    2, 1 sets. It stays at 1 while the trainer keeps its tree and when it drops it. Arrays that
    warm-up computed are freed with the pool."""
    seen = []
    options = SMALL | {"load_format": "dummy"}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        answers(pool)  # without the optimisations upstream keeps the zeros of its first step
        seen.append(in_use(pool))
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
    assert [(size - rest) / one_set for size in seen] == [1, 1, 2, 1, 1, 1]
    assert assert_greedy(target("qwen3"), PROMPTS, results) > len(PROMPTS)


def devices_of(pool: EnginePool) -> list[jax.Device]:
    return [device for worker in pool.runtime.workers for device in worker.devices]


def device_bytes(devices: list[jax.Device]) -> dict[int, int]:
    return {each["device"]: each["bytes_in_use"] for each in memory(devices)["devices"]}


@contextmanager
def peaks(devices: list[jax.Device]) -> Iterator[dict[int, int]]:
    """The largest use of each of these devices, measured after every placement, conversion, join
    or gather, and at every exchange of leaves. A batch beside a second set is no larger here
    than the largest leaf."""
    gc.collect()
    most = device_bytes(devices)

    def look() -> None:
        for device, size in device_bytes(devices).items():
            most[device] = max(most[device], size)

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look()
            return result

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BYTES", 0)
        for name in ("device_put", "make_array_from_single_device_arrays"):
            patch.setattr(jax, name, looking(getattr(jax, name)))
        for name in ("_cut", "_join"):
            patch.setattr(parts, name, looking(getattr(parts, name)))
        for name in ("convert", "gathered"):
            patch.setattr(conversion, name, looking(getattr(conversion, name)))
        patch.setattr(EngineLeaves, "replace", looking(EngineLeaves.replace))
        yield most


def from_directory(model: Path) -> Any:
    return model


def from_iterator(model: Path) -> Any:
    """Tensors that are on the first engine's device already, one at a time."""
    with_names = tensors(model)
    return ((name, jax.numpy.array(with_names.pop(name))) for name in list(with_names))


@pytest.mark.parametrize("source", slow(from_directory, from_iterator))
def test_streaming_takes_one_set_and_a_leaf(
    llama: EnginePool,
    model_dir: Callable[[str], Path],
    target: Callable[[str], Path],
    source: Callable[[Path], Any],
) -> None:
    """No device ever has more than the weights and the largest tensor. Two sets, as an update
    without streaming takes them, would be noticed."""
    largest = max(tensor.nbytes for tensor in tensors(target("llama")).values())
    for model in (model_dir("llama"), target("llama")):
        gc.collect()
        before = device_bytes(devices_of(llama))
        with peaks(devices_of(llama)) as most:
            report = llama.update_weights(source(model), staging="stream")
        assert report.staging == "stream"
        assert max(most[device] - before[device] for device in before) == largest
        gc.collect()
        assert device_bytes(devices_of(llama)) == before
    with peaks(devices_of(llama)) as most:
        report = llama.update_weights(source(model_dir("llama")), staging="double")
    assert all(most[device] - before[device] >= report.nbytes for device in before)


@pytest.mark.parametrize(
    ("layout", "devices"), [(leaves, 2), *slow((tensors, 2), (leaves, 4), (tensors, 4))]
)
def test_gathering_takes_a_leaf(
    llama: EnginePool,
    target: Callable[[str], Path],
    layout: Callable[[Path], Any],
    devices: int,
) -> None:
    """A source that is sharded over the devices is gathered leaf by leaf. Besides the trainer's
    part no device has more than a set and a leaf, or, without streaming, two sets and a leaf."""
    params = layout(target("llama"))
    largest = max(value.nbytes for value in params.values())
    tree = placed(params, PartitionSpec("fsdp"), devices=devices)
    llama.update_weights(tree, copy=True)
    gc.collect()
    before = device_bytes(devices_of(llama))
    for staging, sets in (("stream", 0), ("double", 1)):
        with peaks(devices_of(llama)) as most:
            report = llama.update_weights(tree, staging=staging, copy=True)
        assert report.staging == staging
        more = [most[device] - before[device] for device in before]
        assert sets * report.nbytes <= max(more) <= sets * report.nbytes + largest
        assert max(more) > 0  # it was measured while a gathered leaf existed
        gc.collect()
        assert device_bytes(devices_of(llama)) == before


WHERE = {
    "4-device mesh, 2 engines": ({"devices": 2}, 4),
    "2-device mesh, 4 engines": ({"devices": 4}, 2),
    "4-device mesh, 2 engines of 2": ({"devices": 2, "tp_size": 2}, 4),
    "1 device, 2 engines of 2": ({"devices": 2, "tp_size": 2}, 1),
}


@pytest.mark.parametrize("where", slow(*WHERE))
def test_every_layout_takes_a_leaf(
    make_pool: MakePool,
    model_dir: Callable[[str], Path],
    target: Callable[[str], Path],
    where: str,
) -> None:
    """For any number of devices of the trainer. Besides the trainer's part, an engine's device
    never has more than its part of a set and of a leaf (without streaming, of two sets and a
    leaf). A device without an engine never has more than a leaf."""
    options, count = WHERE[where]
    pool = make_pool("llama", **options)
    tree = placed(leaves(target("llama")), PartitionSpec("fsdp"), devices=count)
    specs = pool.runtime.workers[0].leaves.specs.values()
    sizes = [math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in specs]
    engines = {device.id for device in devices_of(pool)}
    pool.update_weights(tree, copy=True)
    try:
        for staging, sets in (("stream", 0), ("double", 1)):
            gc.collect()
            before = device_bytes(jax.devices())
            with peaks(jax.devices()) as most:
                report = pool.update_weights(tree, staging=staging, copy=True)
            assert report.staging == staging
            for device, size in most.items():
                a_set = sets * sum(sizes) if device in engines else 0
                assert a_set <= size - before[device] <= a_set + max(sizes)
            gc.collect()
            assert device_bytes(jax.devices()) == before
    finally:
        pool.update_weights(model_dir("llama"), weight_version=0)


def test_room_for_a_wider_source(
    make_pool: MakePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors lie on a device in their own dtype until they are cast. If they do not fit beside two
    sets, the update streams."""
    pool = make_pool("llama", 2, dtype="bfloat16", warmup="none")
    given = tensors(target("llama"))
    before = device_bytes(devices_of(pool))
    with peaks(devices_of(pool)) as most:
        pool.update_weights(given, staging="double")
    taken = max(most[device] - before[device] for device in before)
    monkeypatch.setattr(batches, "BYTES", 0)
    for free, expected in ((taken - 1, "stream"), (2 * taken, "double")):
        monkeypatch.setattr("enginepool.runtime.staging.free_bytes", lambda _, free=free: free)
        assert pool.update_weights(given).staging == expected


@contextmanager
def at_rebuilds(pool: EnginePool) -> Iterator[dict[int, int]]:
    """By device, its bytes just before its KV cache is allocated again."""
    seen: dict[int, int] = {}
    rebuild = KVCache.rebuild

    def looking(cache: KVCache) -> int:
        (device,) = cache._runner.mesh.devices.flat
        if cache.dropped:
            seen[device.id] = device_bytes(devices_of(pool))[device.id]
        return rebuild(cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "rebuild", looking)
        yield seen


@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
def test_free_kv_makes_room_for_the_second_set(
    llama: EnginePool,
    target: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
) -> None:
    """A device may have room for two sets or for the KV cache beside one. The second set comes when
    the KV cache is gone. The KV cache comes back when the old set is gone."""
    stage, staged = update.stage, []

    def looking(plan: Any, workers: Any, copy: bool) -> Any:
        staged.extend(worker.scheduler.kv_cache.dropped for worker in workers)
        return stage(plan, workers, copy)

    monkeypatch.setattr(update, "stage", looking)
    gc.collect()
    before = device_bytes(devices_of(llama))
    with at_rebuilds(llama) as seen:
        report = llama.update_weights(target("llama"), free_kv=True, strategy=strategy)
    assert report.staging == "double"
    assert staged == [True] * 2
    assert seen == {device: size - report.kv_bytes // 2 for device, size in before.items()}


@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
def test_free_kv_drops_a_set_that_is_not_used(
    llama: EnginePool, target: Callable[[str], Path], strategy: Any
) -> None:
    """New weights cannot be put in place. The KV cache comes back when they are gone, all but the
    few that the error's traceback holds."""
    one_set = sum(leaf.nbytes for leaf in scheduler_of(llama, 0).leaves.values())
    gc.collect()
    before = device_bytes(devices_of(llama))
    kv_bytes = llama.release_memory_occupation() // 2
    llama.resume_memory_occupation()
    with at_rebuilds(llama) as seen, broken_commit(llama, 0, 7), pytest.raises(WeightUpdateFailed):
        llama.update_weights(target("llama"), free_kv=True, strategy=strategy)
    assert seen
    assert all(size - before[device] + kv_bytes < one_set / 2 for device, size in seen.items())


def test_a_staged_copy_does_not_keep_the_source(
    four: EnginePool, target: Callable[[str], Path]
) -> None:
    """Also if the source lies on the engines' devices in the model's layout."""
    held = in_use(four)
    tree = placed(leaves(target("qwen3")), PartitionSpec())
    staged = four.stage_weights(tree, copy=True)
    del tree
    assert in_use(four) == held + 4 * staged.nbytes
    staged.discard()
    assert in_use(four) == held
