"""New weights: what is refused, partial updates, and reading weights."""

import math
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from enginepool import EnginePool, InvalidWeights, SwapReport
from tests.support.layouts import answers, leaves, own_layout, placed, serves, tensors
from tests.support.liveness import SECONDS, callers, until
from tests.support.pools import MakePool, same

# Arrays that are no weights. The source is at fault, and no device.
ODD: dict[str, Callable[[np.ndarray], Any]] = {
    "masked": lambda value: np.ma.masked_less(value, 0.0),
    "objects": lambda value: value.astype(object),
    "strings": lambda value: value.astype(str),
    "dates": lambda value: np.zeros(value.shape, "M8[s]"),
    "structured": lambda value: np.zeros(value.shape, [("weight", np.float32)]),
    "complex": lambda value: value.astype(np.complex64),
    "booleans": lambda value: value > 0,
    "a number": lambda value: np.array(1.0, np.float32),
    "a list": lambda value: value.tolist(),
    "nothing": lambda value: None,
    "random keys": lambda value: jax.random.split(jax.random.key(0), value.shape),
}
# The same weights in another form.
PLAIN: dict[str, Callable[[np.ndarray], Any]] = {
    "float64": lambda value: value.astype(np.float64),
    "long double": lambda value: value.astype(np.longdouble),
    "big-endian": lambda value: value.astype(">f4"),
    "big-endian float64": lambda value: value.astype(">f8"),
    "nothing masked": np.ma.masked_array,
    "Fortran's order": np.asfortranarray,
    "backwards": lambda value: value[::-1].copy()[::-1],
    "every second": lambda value: np.repeat(value, 2, axis=1)[:, ::2],
    "read-only": lambda value: np.frombuffer(value.tobytes(), np.float32).reshape(value.shape),
}


def broken(kind: str, params: dict[str, np.ndarray], folder: Path) -> tuple[Any, str]:
    """A source that does not fit, and the words of its error."""
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
    elif kind in ODD:
        changed[name] = ODD[kind](params[name])
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


@pytest.fixture(scope="module")
def said_before(keep_pool: MakePool) -> list[dict[str, Any]]:
    """The answers of `llama` with its own weights."""
    return answers(keep_pool("llama", 2))


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        "extra",
        "misshapen",
        "transposed",
        "dtype",
        *ODD,
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
    said_before: list[dict[str, Any]],
    tmp_path: Path,
    kind: str,
) -> None:
    """The error names the tensor or the file. Weights, version and answers stay."""
    before = llama.checksum()
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
    same(answers(llama), said_before)


@pytest.mark.parametrize("before", ["module.", "_orig_mod.model."])
def test_a_wrapper_before_every_name(
    llama: EnginePool, target: Callable[[str], Path], before: str
) -> None:
    """The error says which prefix to remove. It does not suggest a partial update, which would
    update nothing."""
    source = {before + name: value for name, value in tensors(target("llama")).items()}
    with pytest.raises(
        InvalidWeights, match=rf"without the prefix '{re.escape(before)}'"
    ) as caught:
        llama.update_weights(source)
    assert "strict=False" not in str(caught.value)
    del source[f"{before}model.norm.weight"]
    with pytest.raises(InvalidWeights) as caught:
        llama.update_weights(source)
    assert "the prefix" not in str(caught.value)


def test_partial_update(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """strict=False changes the given leaves, and reports the others and unknown names."""
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
    """The same noise on every engine changes both checksums. A name gives rows in its own
    layout."""
    sums = llama.checksum(), llama.quick_checksum()
    llama.perturb_weights(seed=3, scale=0.01, num_leaves=2)
    assert llama.checksum() != sums[0]
    assert llama.quick_checksum() != sums[1]
    first = llama.checksum()
    llama.update_weights(model_dir("llama"))
    assert (llama.checksum(), llama.quick_checksum()) == sums
    llama.perturb_weights(seed=3, scale=0.01, num_leaves=2)
    assert llama.checksum() == first


def test_perturb_while_an_update_waits(
    llama: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that begins while the noise is drawn comes after it, so its weights are whole."""
    normal, steering = jax.random.normal, llama.runtime.steering
    with callers(1) as executor:
        updates: list[Future[Any]] = []

        def drawn(*args: Any) -> Any:
            updates.append(executor.submit(llama.update_weights, target("llama")))
            until(lambda: updates[0].done() or len(steering._changed._waiters))
            return normal(*args)

        monkeypatch.setattr(jax.random, "normal", drawn)
        llama.perturb_weights(scale=0.1)
        assert updates[0].result(SECONDS).staged == llama.checksum()
    serves(llama, target("llama"))


def test_checksums_of_nan(llama: EnginePool, model_dir: Callable[[str], Path]) -> None:
    """Engines with the same NaN do not differ."""
    name = "model.embed_tokens.weight"
    value = np.full_like(tensors(model_dir("llama"))[name], np.nan)
    llama.update_weights({name: value}, strict=False)
    try:
        assert len(llama.engines) > 1
        assert llama.checksum()
        assert math.isnan(llama.quick_checksum())
    finally:
        llama.update_weights(model_dir("llama"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["names", "paths", "iterator"])
def test_plain_conversions(llama: EnginePool, target: Callable[[str], Path], form: str) -> None:
    """For NumPy arrays of any memory layout and width. They arrive as from a checkpoint, without
    a warning."""
    llama.update_weights(target("llama"))
    expected = llama.checksum()
    params = (leaves if form == "paths" else tensors)(target("llama"))
    for kind, convert in PLAIN.items():
        llama.update_weights({name: np.zeros_like(value) for name, value in params.items()})
        assert llama.checksum() != expected
        # Norms have one axis.
        source = {k: convert(v) if v.ndim > 1 else v for k, v in params.items()}
        llama.update_weights(iter(source.items()) if form == "iterator" else source)
        assert llama.checksum() == expected, kind


def test_names_of_an_iterator(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """A name that is no text is an error of the iterator."""
    array = tensors(target("llama"))["model.norm.weight"]
    for name in (b"model.norm.weight", None, 3, ["model.norm.weight"]):
        with pytest.raises(InvalidWeights, match="name"):
            llama.update_weights(iter([(name, array)]))


def test_traced_weights(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """An update inside a function that is being compiled has no values."""
    params = tensors(target("llama"))
    with pytest.raises(InvalidWeights, match=r"model.norm.weight.*jax.jit"):
        jax.jit(lambda array: llama.update_weights({**params, "model.norm.weight": array}))(
            params["model.norm.weight"]
        )


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LISTED: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "NumPy": lambda params: params,
    "JAX": lambda params: {k: jax.numpy.asarray(v) for k, v in params.items()},
    "both": lambda params: {**params, HEAD: jax.numpy.asarray(params[HEAD])},
    "sharded": lambda params: placed(params, PartitionSpec("fsdp")),
    "on two meshes": lambda params: {
        **placed(params, PartitionSpec("fsdp")),
        **placed({HEAD: params[HEAD]}, PartitionSpec(None, "fsdp"), devices=2),
    },
    "head first": lambda params: iter(sorted(params.items())),
    "head last": lambda params: iter(sorted(params.items(), reverse=True)),
    "head last, JAX": lambda params: iter(
        sorted(placed(params, PartitionSpec("fsdp")).items(), reverse=True)
    ),
    "flax tree": lambda params: {
        "params": {
            **{k: v for k, v in own_layout(params).items() if not k.startswith("lm_head")},
            "lm_head": {"kernel": params[HEAD].T},
        }
    },
}


@pytest.mark.parametrize("staging", ["double", "stream"])
@pytest.mark.parametrize("kind", LISTED)
def test_head_of_a_model_with_tied_embeddings(
    four: EnginePool, target: Callable[[str], Path], kind: str, staging: Any
) -> None:
    """State dicts have the head beside the embedding that it is tied to. If they are equal,
    nothing is wrong. If not, no model of this shape can have both, and nothing changes."""
    before = four.checksum()
    params = tensors(target("qwen3"))
    other = params[EMBEDDING].copy()
    other[-1, -1] += 0.5
    with pytest.raises(InvalidWeights, match="tie_word_embeddings") as caught:
        four.update_weights(LISTED[kind]({**params, HEAD: other}), staging=staging)
    assert caught.value.names == ("params.lm_head.kernel" if kind == "flax tree" else HEAD,)
    assert four.checksum() == before
    source = LISTED[kind]({**params, HEAD: params[EMBEDDING].copy()})
    four.update_weights(source, staging=staging)
    given = four.checksum()
    report = four.update_weights(LISTED[kind]({**params, HEAD: other}), strict=False)
    assert len(report.ignored) == 1
    four.update_weights(target("qwen3"))
    assert four.checksum() == given
