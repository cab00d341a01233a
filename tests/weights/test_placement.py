"""Which arrays of a source are shared with engines and which are copied: four engines on four
devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool, NoWeights
from tests.support.layouts import (
    PROMPTS,
    answers,
    devices_only,
    leaves,
    on_host,
    placed,
    pointers,
    serves,
    tensors,
)
from tests.support.liveness import SECONDS, callers, running, until
from tests.support.marks import slow
from tests.support.pools import compilations


def test_replicated_arrays_are_shared(four: EnginePool, target: Callable[[str], Path]) -> None:
    """A tree that is on every engine's device becomes the engines' weights without a copy."""
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


FSDP, COLUMNS, TWO_D = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec("a", "b")


@pytest.mark.parametrize(
    ("options", "spec", "devices"),
    [
        ({"staging": "double"}, FSDP, 4),
        ({"copy": True}, FSDP, 4),
        ({"staging": "stream"}, COLUMNS, 2),
        ({"staging": "double"}, TWO_D, 4),
        *slow(
            ({"staging": "stream"}, FSDP, 4),
            ({"strategy": "rolling"}, FSDP, 4),
            ({"staging": "double"}, COLUMNS, 2),
            ({"staging": "double"}, PartitionSpec(), 4),
            ({"staging": "stream"}, PartitionSpec(), 2),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [leaves, tensors], ids=["model's layout", "Hugging Face's"])
def test_sharded_arrays_are_gathered(
    four: EnginePool,
    target: Callable[[str], Path],
    layout: Callable[[Path], dict[str, np.ndarray]],
    options: dict[str, Any],
    spec: PartitionSpec,
    devices: int,
) -> None:
    """A trainer's tree with a part of every matrix on each device. No array goes through the
    host, and every engine has what an update from the host gives it. An array that is whole on
    an engine's device, in the model's layout, is shared with that engine."""
    four.update_weights(target("qwen3"))
    expected = four.checksum()
    tree = placed(layout(target("qwen3")), spec, devices=devices)
    with devices_only():
        report = four.update_weights(tree, **options)
    assert {engine.fingerprint for engine in report.engines} == {report.staged} == {expected}
    assert on_host(tree) == []
    whole = [
        name
        for name, array in tree.items()
        if array.is_fully_replicated and not (layout is tensors and name.endswith("proj.weight"))
    ]
    shared = 0 if options.get("copy") else len(whole)
    assert [e.shared for e in report.engines] == [shared] * devices + [0] * (4 - devices)
    assert [e.shared + e.copied for e in report.engines] == [len(tree)] * 4
    serves(four, target("qwen3"))


def test_sharded_arrays_of_another_dtype(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Trainers may keep float32 where engines do not, or the reverse. The devices cast, with the
    result of a cast on the host."""
    narrow = {k: v.astype(jax.numpy.bfloat16) for k, v in leaves(target("qwen3")).items()}
    four.update_weights(narrow)
    expected = four.checksum()
    tree = placed(narrow, FSDP)
    with devices_only():
        four.update_weights(tree)
    assert four.checksum() == expected
    assert on_host(tree) == []


def test_a_gather_is_compiled_once(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The next update of the same shapes, from another mesh object, compiles nothing."""
    for layout in (leaves, tensors):
        params = layout(target("qwen3"))
        four.update_weights(placed(params, FSDP))
        tree = placed(params, FSDP)
        with compilations() as seen:
            four.update_weights(tree)
        assert seen == []


def test_arrays_on_one_device(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The engine of that device shares them, the others get copies."""
    tree = placed(leaves(target("qwen3")), PartitionSpec(), devices=1)
    report = four.update_weights(tree)
    assert [e.shared for e in report.engines] == [len(tree), 0, 0, 0]
    serves(four, target("qwen3"))


def test_every_engine_copies_from_the_source(
    llama: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies on a trainer's device, in the model's layout, goes from there to each engine. No
    engine waits for another's copy."""
    trainer = jax.devices()[3]
    tree = {k: jax.device_put(v, trainer) for k, v in leaves(target("llama")).items()}
    put, sources = jax.device_put, []

    def noted(arrays: Any, *args: Any, **kwargs: Any) -> Any:
        sources.extend(array.devices() for array in arrays)
        return put(arrays, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", noted)
        report = llama.update_weights(tree, mode="abort", staging="double")
    assert sources == [{trainer}] * (2 * len(tree))
    assert {engine.fingerprint for engine in report.engines} == {report.staged}


def test_numpy_is_copied(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Writing to an array after the update changes no engine."""
    mine = {name: np.array(value) for name, value in tensors(target("qwen3")).items()}
    four.update_weights(mine)
    before = four.checksum()
    for value in mine.values():
        value[:] = 0
    assert four.checksum() == before


def test_donated_source(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The owner deletes the weights. The error names the remedy, every call gets it, no engine
    is lost, and the next update recovers. With copy=True there is no error."""
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


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_donated_source_of_one_engine(
    four: EnginePool,
    target: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    busy: bool,
) -> None:
    """Other engines do the work. Event and log say at once which engine is out, why, and the
    remedy. An idle engine needs no request for that."""
    tree = placed(leaves(target("qwen3")), PartitionSpec(), devices=1)
    four.update_weights(tree)
    before = len(four.events())
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 200}
    with callers(1) as executor, caplog.at_level("WARNING", "enginepool"):
        if busy:
            call = executor.submit(four.generate_all, None, params, input_ids=PROMPTS * 4)
            until(lambda: running(four) == 16)
        for array in tree.values():
            array.delete()
        if not busy:
            call = executor.submit(four.generate_all, None, params, input_ids=PROMPTS * 4)
        results = call.result(SECONDS)
    assert [len(result["output_ids"]) for result in results] == [200] * 16
    (event,) = four.events()[before:]
    assert (event["event"], event["engine"]) == ("engine_unloaded", 0)
    assert "copy=True" in event["reason"]
    assert bool(event["requests"]) == busy
    (record,) = caplog.records
    assert "enginepool.engine_unloaded" in record.getMessage()
    assert "copy=True" in str(vars(record))
    assert [e["state"] for e in four.stats()["engines"]] == ["unloaded", *["serving"] * 3]


@pytest.mark.parametrize("kind", ["sharded", "NumPy", "checkpoint", "iterator"])
def test_a_trainers_mesh_does_not_matter(
    four: EnginePool, target: Callable[[str], Path], kind: str
) -> None:
    """Inside a trainer's `jax.set_mesh` over several devices, updates and checksums work as
    outside. The trainer's own iterator still has its mesh."""
    names = tensors(target("qwen3"))
    sharded = placed(names, FSDP)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    seen = set()

    def iterator() -> Any:
        for pair in sharded.items():
            seen.add(jax.sharding.get_abstract_mesh().axis_names)
            yield pair

    source = {
        "sharded": sharded,
        "NumPy": names,
        "checkpoint": target("qwen3"),
        "iterator": iterator(),
    }[kind]
    with jax.set_mesh(mesh):
        four.update_weights(source)
        four.checksum()
        four.quick_checksum()
        four.get_weights_by_name("model.embed_tokens.weight")
    assert seen == ({("a", "b")} if kind == "iterator" else set())
    serves(four, target("qwen3"))
    with jax.set_mesh(mesh):
        four.perturb_weights(num_leaves=2)
    assert four.checksum()
