"""The engines' forward as a function of a trainer's parameters: its values, its gradient, its
errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidWeights
from enginepool.toy.files import read_checkpoint
from enginepool.toy.model import forward as reference
from tests.support.pools import NATIVE_PAGES, SMALL, MakePool
from tests.support.scores import ids

# All have one shape: rows are padded with zeros.
ROWS = [ids(length, length) for length in (3, 40, 17)]
TOKENS = np.array([row + [0] * (40 - len(row)) for row in ROWS], np.int32)
REAL = np.array([[1.0] * (len(row) - 1) + [0.0] * (40 - len(row)) for row in ROWS])


def checkpoint(folder: Path) -> tuple[Any, dict[str, jax.Array]]:
    config, params = read_checkpoint(folder)
    return config, {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def loss(forward: Callable[..., jax.Array], params: Any) -> jax.Array:
    every = jax.nn.log_softmax(forward(params, TOKENS)[:, :-1].astype(jnp.float32))
    chosen = jnp.take_along_axis(every, TOKENS[:, 1:, None], axis=-1)[..., 0]
    return -(chosen * REAL).sum() / REAL.sum()


newer = pytest.mark.skipif(not NATIVE_PAGES, reason="JAX 0.8 cannot differentiate the models")


@newer
def test_values_and_gradient(make_pool: MakePool, model_dir: Callable[[str], Path]) -> None:
    """They are those of plain JAX in float32."""
    config, params = checkpoint(model_dir("llama"))
    forward = make_pool("llama", 2).forward_function()
    both = [forward, lambda params, tokens: reference(config, params, tokens)]
    got, expected = (
        jax.jit(jax.value_and_grad(lambda params, one=one: loss(one, params)))(params)
        for one in both
    )
    assert float(got[0]) == pytest.approx(float(expected[0]), abs=1e-5)
    for name, slope in expected[1].items():
        size = np.abs(slope).max()
        np.testing.assert_allclose(got[1][name], slope, atol=1e-4 * size, err_msg=name)


@pytest.mark.slow
@newer
def test_in_bfloat16(make_pool: MakePool, model_dir: Callable[[str], Path]) -> None:
    """They equal the scores of an engine with the same float32 parameters. Padding is on either
    side."""
    pool = make_pool("qwen3", 1, dtype="bfloat16", warmup="none")
    _, params = checkpoint(model_dir("qwen3"))
    params = {name: value * 1.01 for name, value in params.items()}
    exported = pool.forward_function()
    # In one program JAX could keep more precision than bfloat16 between operations.
    forward = jax.jit(lambda *given: exported(*given).astype(jnp.float32))
    pool.update_weights(params)
    logits = forward(params, TOKENS)
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    left = np.array([[0] * (40 - len(row)) + row for row in ROWS], np.int32)
    mask = np.array([[False] * (40 - len(row)) + [True] * len(row) for row in ROWS])
    for row, other, here in zip(logits, forward(params, left, mask), mask, strict=True):
        np.testing.assert_array_equal(np.asarray(row)[: here.sum()], np.asarray(other)[here])
    every = np.asarray(jax.nn.log_softmax(logits))
    scores: Any = pool.score(
        input_ids=[row[:1] for row in ROWS], continuation_ids=[row[1:] for row in ROWS]
    )
    for row, tokens, score in zip(every, ROWS, scores, strict=True):
        values = row[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(values, score["logprobs"], atol=1e-5)


@newer
def test_refused(pool: EnginePool, make_pool: MakePool, model_dir: Callable[[str], Path]) -> None:
    forward = pool.forward_function()
    _, params = checkpoint(model_dir("qwen3"))
    name = "model.embed_tokens.weight"
    for wrong in ({name: params[name].T}, {}):
        given = {one: value for one, value in params.items() if one != name} | wrong
        with pytest.raises(InvalidWeights, match=name) as error:
            forward(given, TOKENS)
        assert error.value.names == (name,)
    with (
        EnginePool(str(model_dir("llama")), devices=1, tp_size=2, **SMALL, warmup="none") as two,
        pytest.raises(InvalidConfig, match="tp_size=1"),
    ):
        two.forward_function()


@pytest.mark.skipif(NATIVE_PAGES, reason="this JAX can differentiate the models")
def test_an_older_jax(pool: EnginePool) -> None:
    with pytest.raises(InvalidConfig, match="differentiate"):
        pool.forward_function()
