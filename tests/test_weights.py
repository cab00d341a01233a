"""New weights: what is refused, what a part of them does, and looking at them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layouts import answers, tensors
from safetensors.numpy import load_file, save_file
from support import same

from enginepool import EnginePool, InvalidWeights, SwapReport


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
        source, said = broken(kind, tensors(target("llama")), tmp_path)
    with pytest.raises(InvalidWeights) as caught:
        llama.update_weights(source)
    assert said in str(caught.value)
    assert llama.checksum() == before
    assert llama.stats()["weight_version"] == version
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
    assert len(report.left) == len(tensors(target("llama"))) - 1
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
