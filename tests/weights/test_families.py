"""Weights with Hugging Face names, in every family that the pool is tested with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from enginepool.toy.files import read_checkpoint
from tests.support.forced import assert_greedy
from tests.support.marks import slow
from tests.support.pools import SMALL, same
from tests.support.reference import make_random_model

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [7] * 30, [90, 91]]
# Further options of a family on CPU: upstream's default experts are a TPU kernel.
OPTIONS: dict[str, dict[str, Any]] = {"qwen3_moe": {"moe_backend": "epmoe"}}
FAMILIES = [
    ("qwen2", "tied"),
    *slow(
        ("llama", "untied"),
        ("gemma2", "tied"),
        ("qwen3_moe", "tied"),
        ("qwen2", "untied"),
        ("qwen3", "tied"),
        ("qwen3", "untied"),
        ("llama", "tied"),
        ("qwen3_moe", "untied"),
    ),
]
# A tensor that only this family has, or that it names differently. Each has the layout that
# upstream turns it into.
TENSORS = {
    "qwen2": "model.layers.0.self_attn.k_proj.bias",
    "qwen3": "model.layers.0.self_attn.k_norm.weight",
    "llama": "model.layers.0.self_attn.o_proj.weight",
    "gemma2": "model.layers.0.pre_feedforward_layernorm.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.4.down_proj.weight",
}


def answers(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_round_trip(family: str, head: str, tmp_path: Path) -> None:
    """From one checkpoint's weights to another's and back, by directory and by dict of arrays.
    Each time every engine gives the reference's answers for those weights, and in the end those
    of the start."""
    # Llama has the shapes of other tests, whose programs are compiled already.
    shape = {"num_layers": 2 if family == "llama" else 1, "num_heads": 4}
    first, second = (
        make_random_model(tmp_path / str(seed), family, seed, **shape, tied=head == "tied")
        for seed in (1, 2)
    )
    # Stacked experts have their own mesh, so a second engine is another case.
    devices = 2 if family == "qwen3_moe" else 1
    options = SMALL | {"warmup": "none"} | OPTIONS.get(family, {})
    with EnginePool(str(first), devices=devices, **options) as pool:
        fresh, checksum = answers(pool), pool.checksum()
        assert_greedy(first, PROMPTS, fresh)
        for there, back in ((str, tensors), (tensors, str)):
            report = pool.update_weights(there(second))
            assert (report.left, report.ignored) == ((), ())
            assert pool.checksum() != checksum
            assert assert_greedy(second, PROMPTS, answers(pool)) > len(PROMPTS)
            looked_up(pool, second, family)
            pool.update_weights(back(first))
            assert pool.checksum() == checksum
            same(answers(pool), fresh)


def tensors(model: Path) -> dict[str, np.ndarray]:
    return read_checkpoint(model)[1]


def looked_up(pool: EnginePool, model: Path, family: str) -> None:
    """A tensor is returned as the checkpoint has it."""
    projection = "model.layers.0.self_attn.q_proj.weight"
    for name in ("model.embed_tokens.weight", projection, TENSORS[family]):
        expected = tensors(model)[name]
        np.testing.assert_array_equal(pool.get_weights_by_name(name, len(expected)), expected)
