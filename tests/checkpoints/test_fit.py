"""A pool opens only if the names, shapes and dtypes of the files fit its model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from enginepool import EnginePool, InvalidWeights
from tests.support import opening
from tests.support.checkpoints import FAMILIES, FILE, Tensors, cut, dropped, make, renamed
from tests.support.layouts import GREEDY, PROMPTS, serves
from tests.support.pools import SMALL
from tests.support.reference import LARGER

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def chained(*edits: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        for each in edits:
            tensors = each(tensors)
        return tensors

    return edit


def added(name: str, shape: tuple[int, ...] = (256,)) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: np.ones(shape, np.float32)}


class BadCheckpoint(NamedTuple):
    """A change of the tensors, and the words of the error."""

    edit: Callable[[Tensors], Tensors]
    says: tuple[str, ...]
    families: tuple[str, ...] = FAMILIES
    names: str = EMBEDDING


BAD_CHECKPOINTS = {
    "torch.compile": BadCheckpoint(renamed("", "_orig_mod."), ("without the prefix '_orig_mod.'",)),
    "PEFT": BadCheckpoint(
        renamed("", "base_model.model."), ("without the prefix 'base_model.model.'",)
    ),
    "DDP": BadCheckpoint(renamed("", "module."), ("without the prefix 'module.'",)),
    "no prefix": BadCheckpoint(renamed("model.", ""), ("with the prefix 'model.'",)),
    "nothing": BadCheckpoint(
        lambda tensors: {"weight": np.ones(3, np.float32)}, ("missing", "weight")
    ),
    "no norm": BadCheckpoint(dropped(NORM), ("missing 1 name: model.norm.weight",), names=NORM),
    "another name": BadCheckpoint(
        renamed("model.norm.", "model.final_norm."),
        ("model.norm.weight is missing, model.final_norm.weight is the nearest",),
        names=NORM,
    ),
    "short embedding": BadCheckpoint(
        cut(EMBEDDING, 200), ("shape (200, 256), expected (272, 256)", EMBEDDING)
    ),
    "short norm": BadCheckpoint(cut(NORM, 40), ("shape (40,), expected (256,)",), names=NORM),
    "a layer too many": BadCheckpoint(
        added("model.layers.9.input_layernorm.weight"),
        ("unknown 1 name: model.layers.9.input_layernorm.weight",),
        names="model.layers.9.input_layernorm.weight",
    ),
    "a bias that is not added": BadCheckpoint(
        added("model.layers.0.self_attn.o_proj.bias"),
        ("unknown 1 name: model.layers.0.self_attn.o_proj.bias",),
        names="model.layers.0.self_attn.o_proj.bias",
    ),
    "integers": BadCheckpoint(
        lambda tensors: tensors | {NORM: np.ones(256, np.int32)},
        ("dtype int32 cannot become the model's float32",),
        names=NORM,
    ),
    "no bias": BadCheckpoint(
        dropped("k_proj.bias"),
        ("missing 2 names: model.layers.0.self_attn.k_proj.bias",),
        ("qwen2",),
        "model.layers.0.self_attn.k_proj.bias",
    ),
    "no head": BadCheckpoint(
        dropped("lm_head"), ("missing 1 name: lm_head",), ("llama",), "lm_head.weight"
    ),
    "an expert gone": BadCheckpoint(
        dropped("layers.1.mlp.experts.4.up_proj"),
        ("missing 1 name: model.layers.1.mlp.experts.4.up_proj.weight",),
        ("qwen3_moe",),
        "model.layers.1.mlp.experts.4.up_proj.weight",
    ),
    "a short expert": BadCheckpoint(
        cut("model.layers.1.mlp.experts.4.up_proj.weight", 60),
        ("shape (60, 256), expected (64, 256)",),
        ("qwen3_moe",),
        "model.layers.1.mlp.experts.4.up_proj.weight",
    ),
    "a head of its own beside a tied embedding": BadCheckpoint(
        lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING] + 1},
        ("lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"),
        ("qwen2", "qwen3", "gemma2", "qwen3_moe"),
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize(
    ("family", "quirk"),
    [(f, quirk) for quirk, each in BAD_CHECKPOINTS.items() for f in each.families],
)
def test_a_checkpoint_that_does_not_fit(tmp_path: Path, family: str, quirk: str) -> None:
    """A checkpoint that does not fit is refused. The error names the tensor."""
    bad = BAD_CHECKPOINTS[quirk]
    folder = make(tmp_path / "model", family, edit=bad.edit)
    with pytest.raises(InvalidWeights) as caught:
        opening.read(folder)
    assert str(folder) in str(caught.value)
    assert [part for part in bad.says if part not in str(caught.value)] == []
    assert bad.names in caught.value.names


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_harmless(tmp_path: Path, family: str, devices: int) -> None:
    """A checkpoint that fits opens with the extra tensors that many checkpoints have, also
    sharded over devices."""
    random: dict[str, Any] = LARGER if family == "qwen3" else {}
    extras = [added("model.layers.0.self_attn.rotary_emb.inv_freq", (64,))]
    if family != "llama":
        extras.append(lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING]})
    plain = opening.read(make(tmp_path / "plain", family, **random), devices)
    opening.same_leaves(
        opening.read(make(tmp_path / "more", family, **random, edit=chained(*extras)), devices),
        plain,
    )


def test_layers_left_out(tmp_path: Path) -> None:
    """A model with fewer layers than the checkpoint opens. Layers that predict further tokens
    are left out."""
    folder = make(tmp_path / "more", "llama", num_layers=3)
    fewer = opening.read(folder, model_override_args='{"num_hidden_layers": 2}')
    assert {path.split(".")[2] for path in fewer if ".layers." in path} == {"0", "1"}
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    opening.same_leaves(
        opening.read(make(tmp_path / "next", "llama", num_layers=3, config=config)), fewer
    )


def test_a_pool_does_not_open(tmp_path: Path) -> None:
    """It fails before anything is compiled, with the checkpoint's own error. Opening may be
    tried again."""
    folder = make(tmp_path / "model", "llama", edit=renamed("", "_orig_mod."))
    pool = EnginePool(str(folder), devices=2, warmup="none", **SMALL)
    with pytest.raises(InvalidWeights, match=r"without the prefix '_orig_mod\.'"):
        pool.open()
    make(folder, "llama")
    with pool.open():
        serves(pool, folder)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama")
    (folder / FILE).unlink()
    with EnginePool(str(folder), devices=1, warmup="none", load_format="dummy", **SMALL) as pool:
        assert pool.generate_all(input_ids=PROMPTS[:1], sampling_params=GREEDY)
