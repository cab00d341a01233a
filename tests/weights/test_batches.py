"""Leaves in batches: their sizes, equal batches, and work that is not repeated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool
from enginepool.weights import batches
from enginepool.weights.batches import batched
from enginepool.weights.fit import Fit
from tests.support.layouts import leaves, placed, serves, tensors
from tests.support.pools import compilations

# Paths and bytes of a model with ten layers of three leaves.
MODEL = {"embed": 50, "norm": 1} | {
    f"layers.{layer}.{name}": size
    for layer in range(10)
    for name, size in (("norm", 1), ("up", 9), ("down", 10))
}


@pytest.mark.parametrize("limit", [1, 9, 10, 15, 20, 45, 50, 1000])
@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_bounds(limit: int, most: int) -> None:
    """Every leaf comes once and in order. A batch of several leaves stays within both limits."""
    found = list(batched(MODEL, str, MODEL.__getitem__, limit, most))
    assert [path for batch in found for path in batch] == list(MODEL)
    assert all(
        len(batch) == 1 or (len(batch) <= most and sum(map(MODEL.__getitem__, batch)) <= limit)
        for batch in found
    )


@pytest.mark.parametrize(("limit", "kinds"), [(45, 1), (20, 1), (15, 2)])
def test_layers_are_alike(limit: int, kinds: int) -> None:
    """Batches begin and end with layers, so most of them need the same program."""
    found = list(batched(MODEL, str, MODEL.__getitem__, limit))
    assert all(len({"." in path for path in batch}) == 1 for batch in found)
    layers = {tuple(path.split(".", 2)[-1] for path in batch) for batch in found if "." in batch[0]}
    assert len(layers) == kinds


KINDS: dict[str, Callable[[dict[str, np.ndarray]], dict[str, Any]]] = {
    "NumPy": dict,
    "on a device": lambda params: placed(params, PartitionSpec(), devices=1),
    "sharded": lambda params: placed(params, PartitionSpec("fsdp")),
    "sharded over two": lambda params: placed(params, PartitionSpec(None, "fsdp"), devices=2),
    "replicated": lambda params: placed(params, PartitionSpec()),
    "wider": lambda params: {name: value.astype(np.float64) for name, value in params.items()},
}


@pytest.mark.parametrize("staging", ["double", "stream"])
@pytest.mark.parametrize("layout", [leaves, tensors], ids=["model's layout", "Hugging Face's"])
def test_one_source_of_every_kind(
    four: EnginePool, target: Callable[[str], Path], layout: Callable[..., Any], staging: Any
) -> None:
    """In one batch, every other leaf is on other devices. All of them arrive."""
    four.update_weights(target("qwen3"))
    expected = four.checksum()
    params = layout(target("qwen3"))
    four.update_weights({name: np.zeros_like(value) for name, value in params.items()})
    source = {}
    for number, (name, value) in enumerate(params.items()):
        source |= list(KINDS.values())[number % len(KINDS)]({name: value})
    report = four.update_weights(source, staging=staging)
    assert four.checksum() == report.staged == expected
    serves(four, target("qwen3"))


def test_the_next_of_a_kind(four: EnginePool, target: Callable[[str], Path]) -> None:
    """A second source with the same names, shapes and dtypes is not checked again, and compiles
    nothing. One with another dtype is checked."""
    params = tensors(target("qwen3"))
    first, second = (jax.device_put(params, jax.devices()[0]) for _ in range(2))
    four.update_weights(first)
    looked_at: list[Fit] = []
    resolve = Fit.resolve

    def noting(fit: Fit) -> None:
        looked_at.append(fit)
        resolve(fit)

    with pytest.MonkeyPatch.context() as patch, compilations() as compiled:
        patch.setattr(Fit, "resolve", noting)
        four.update_weights(second)
        assert (looked_at, compiled) == ([], [])
        four.update_weights({k: v.astype(np.float16) for k, v in params.items()})
        assert len(looked_at) == 1


@pytest.mark.parametrize("limit", [0, 1 << 19, 1 << 30])
def test_batches_do_not_matter(
    four: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The weights are the same for any batch size."""
    four.update_weights(target("qwen3"))
    expected = four.checksum()
    monkeypatch.setattr(batches, "BYTES", limit)
    params = tensors(target("qwen3"))
    for source in (params, iter(params.items()), placed(params, PartitionSpec("fsdp"))):
        four.perturb_weights(num_leaves=9)
        four.update_weights(source)
        assert four.checksum() == expected
