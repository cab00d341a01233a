"""What is accepted as an adapter, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidRequest, InvalidWeights
from enginepool.lora.source import read_adapter
from enginepool.sizing.shape import read_shape
from tests.lora.conftest import LORA, World
from tests.support.adapters import Arrays, config, random_adapter, write_adapter
from tests.support.pools import SMALL

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def without(arrays: Arrays, part: str) -> Arrays:
    return {name: value for name, value in arrays.items() if part not in name}


BROKEN: dict[str, tuple[Callable[[Arrays], Any], dict[str, Any], str]] = {
    "half": (lambda a: without(a, f"{Q}B"), {}, "without its lora_A or lora_B"),
    "extra": (lambda a: a | {"base_model.model.lm_head.lora_A.weight": a[f"{Q}A.weight"],
                             "base_model.model.lm_head.lora_B.weight": a[f"{Q}B.weight"]},
              {}, "lm_head is no layer"),
    "embedding": (lambda a: a | {"model.embed_tokens.lora_embedding_A": a[f"{Q}A.weight"]},
                  {}, "lora_embedding_A"),
    "shape": (lambda a: a | {f"{Q}A.weight": a[f"{Q}A.weight"][:, 1:]}, {}, "q_proj: lora_A"),
    "rank": (lambda a: a, {"r": 3}, "rank 4, but its configuration says r=3"),
    "kind": (lambda a: a | {f"{Q}A.weight": a[f"{Q}A.weight"].astype(np.int32)}, {}, "int32"),
    "nan": (lambda a: a | {f"{Q}A.weight": a[f"{Q}A.weight"] * np.nan}, {}, "NaN"),
    "nan in B": (lambda a: a | {f"{Q}B.weight": a[f"{Q}B.weight"] * np.nan}, {}, r"lora_B: NaN"),
    "large": (lambda a: a | {f"{Q}B.weight": a[f"{Q}B.weight"] + np.float64(1e300)}, {},
              "too large for float32"),
    "infinite": (lambda a: a, {"lora_alpha": float("inf")}, "lora_alpha"),
    "huge": (lambda a: a, {"r": 10**400}, "expected a rank"),
    "pattern": (lambda a: a, {"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    "patterns": (lambda a: a, {"rank_pattern": {"q_proj": "4"}}, "rank_pattern"),
    "alpha": (lambda a: a, {"lora_alpha": None}, "lora_alpha"),
    "dora": (lambda a: a, {"use_dora": True}, "use_dora"),
    "bias": (lambda a: a, {"bias": "all"}, "bias"),
    "saved": (lambda a: a, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pissa": (lambda a: a, {"init_lora_weights": "pissa_niter_4"}, "pissa"),
    "empty": (lambda a: {}, {}, "empty"),
    "leaves": (lambda a: list(a.values()), {}, "list"),
    "number": (lambda a: a | {5: a[f"{Q}A.weight"]}, {}, "1 name: 5"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_refused(kind: str, adapted: EnginePool, world: World) -> None:
    change, fields, said = BROKEN[kind]
    with pytest.raises(InvalidWeights, match=said):
        adapted.load_lora_adapter(
            "x", change(world.arrays["a"]), config_dict={**config(4), **fields}
        )
    assert adapted.stats()["lora_adapters"] == {}


def test_layers_that_are_no_targets(adapted: EnginePool, world: World) -> None:
    scheduler = adapted.runtime.workers[0].scheduler
    slots: Any = scheduler.adapters
    layers = {path: sizes for path, sizes in slots.layers.items() if "q_proj" not in path}
    paths = scheduler.hugging_face.paths
    with pytest.raises(InvalidWeights, match=r"q_proj is not among lora_target_modules"):
        read_adapter(world.arrays["a"], config(4), paths, layers, 4)


def test_rank_above_the_slots(adapted: EnginePool, world: World) -> None:
    arrays = random_adapter(world.model, 0, rank=5)
    with pytest.raises(InvalidWeights, match="rank 5 is more than max_lora_rank=4"):
        adapted.load_lora_adapter("x", arrays, config_dict=config(5))


def test_arrays_need_a_scale(adapted: EnginePool, world: World) -> None:
    with pytest.raises(InvalidWeights, match="config_dict"):
        adapted.load_lora_adapter("x", world.arrays["a"])
    adapted.load_lora_adapter("x", world.arrays["a"], config_dict=config(4))
    adapted.load_lora_adapter("x", world.arrays["a"])  # the scale is known from the load before


def test_a_folder_has_its_own_fields(adapted: EnginePool, world: World) -> None:
    """Others beside it would change its scale."""
    with pytest.raises(InvalidWeights, match="a folder has its own adapter_config"):
        adapted.load_lora_adapter("x", world.folders["a"], config_dict=config(4, 99))


def test_a_scale_of_zero_for_most_layers() -> None:
    """`alpha_pattern` gives one layer a scale, and `lora_alpha` gives the others none."""
    a, b = np.ones((4, 8), np.float32), np.ones((6, 4), np.float32)
    names = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    arrays = {
        f"{name}.lora_{side}.weight": {"A": a, "B": b}[side] for name in names for side in "AB"
    }
    paths = {f"{name}.weight": f"{name}.weight" for name in names}
    fields = config(4, 0, alpha_pattern={"q_proj": 2})
    made = read_adapter(arrays, fields, paths, dict.fromkeys(names, (8, 6)), 4)
    sides = [made.scale * np.asarray(made.arrays[name][1]) for name in names]
    assert [float(side.max()) for side in sides] == [0.5, 0.0]


def test_a_configuration_that_is_no_dict(adapted: EnginePool, world: World) -> None:
    given: Any = [("r", 4)]
    with pytest.raises(InvalidWeights, match="expected a dict with the fields of adapter_config"):
        adapted.load_lora_adapter("x", world.arrays["a"], config_dict=given)


def test_broken_folder(adapted: EnginePool, world: World, tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match="no adapter_config"):
        adapted.load_lora_adapter("x", tmp_path)
    folder = write_adapter(tmp_path / "cut", world.arrays["a"], config(4))
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(InvalidWeights, match="adapter_model"):
        adapted.load_lora_adapter("x", folder)


@pytest.mark.parametrize(
    "change", [jnp.asarray, lambda a: a.astype(np.float64), lambda a: a.astype(ml_dtypes.bfloat16)]
)
def test_arrays_of_every_kind(
    change: Callable[[np.ndarray], Any], adapted: EnginePool, world: World
) -> None:
    kind = {name: change(value) for name, value in world.arrays["a"].items()}
    plain = {name: np.asarray(value).astype(np.float32) for name, value in kind.items()}
    adapted.load_lora_adapter("kind", kind, config_dict=config(4))
    adapted.load_lora_adapter("plain", plain, config_dict=config(4))
    one, other = adapted.generate_all(
        input_ids=[[9, 8, 7]] * 2, sampling_params=GREEDY, lora_path=["kind", "plain"]
    )
    assert one["output_ids"] == other["output_ids"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_lora_rank": 4}, "without enable_lora"),
        ({"enable_lora": True}, "max_lora_rank and lora_target_modules"),
        ({**LORA, "lora_target_modules": ["lm_head"]}, "lora_target_modules"),
        ({**LORA, "lora_target_modules": [["q_proj"]]}, "lora_target_modules"),
        ({**LORA, "max_lora_rank": 0}, "max_lora_rank=0"),
        ({**LORA, "lora_paths": ["x"]}, "load_lora_adapter"),
        ({"enable_static_lora": True}, "enable_lora"),
        ({**LORA, "lora_eviction_policy": "fifo"}, "least recently used"),
    ],
)
def test_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        EnginePool(**options)


def test_stacked_experts(model_dir: Callable[[str], Path]) -> None:
    pool = EnginePool(str(model_dir("qwen3_moe")), devices=1, warmup="none", **LORA, **SMALL)
    with pytest.raises(InvalidConfig, match=r"experts are stacked.*leave \w+_proj out"):
        pool.open()


def test_a_slot_costs_what_the_plan_says(opened: EnginePool, world: World) -> None:
    shape = read_shape(str(world.model), {"dtype": "float32"})
    scheduler = opened.runtime.workers[0].scheduler
    assert scheduler.adapters is not None
    specs = scheduler.leaves.adapter_specs.values()
    slots = sum(spec.size * spec.dtype.itemsize for spec in specs)
    assert slots == scheduler.adapters.count * shape.adapter_bytes(4, ["all"])


def test_a_pool_without_adapters(pool: EnginePool, world: World) -> None:
    with pytest.raises(InvalidRequest, match="enable_lora"):
        pool.load_lora_adapter("a", world.folders["a"])
    with pytest.raises(InvalidRequest, match="enable_lora"):
        pool.generate(input_ids=[1, 2], lora_path="a")
    assert "lora_adapters" not in pool.stats()
    assert not pool.runtime.workers[0].leaves.adapter_specs
