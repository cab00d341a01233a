"""Random adapters in PEFT's format, and the weights that they make of a checkpoint's."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import FILE

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Arrays = dict[str, np.ndarray]


def random_adapter(
    model: Path, seed: int, *, rank: int = 4, targets: Iterable[str] = ALL, std: float = 0.12
) -> Arrays:
    """A and B of every target, by PEFT's names."""
    rng, arrays = np.random.default_rng(seed), {}
    weights = [each for file in model.glob("*.safetensors") for each in load_file(file).items()]
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] in targets:
            size_out, size_in = weight.shape
            at = f"base_model.model.{layer}.lora_"
            arrays[f"{at}A.weight"] = rng.normal(0, std, (rank, size_in)).astype(np.float32)
            arrays[f"{at}B.weight"] = rng.normal(0, std, (size_out, rank)).astype(np.float32)
    return arrays


def config(rank: int = 4, alpha: float = 8, **more: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **more}


def write_adapter(folder: Path, arrays: Arrays, fields: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    return folder


def merged(folder: Path, model: Path, arrays: Arrays, scale: float | Mapping[str, float]) -> Path:
    """A checkpoint whose weights include the adapter: W + scale · B · A."""
    shutil.copytree(model, folder)
    weights = load_file(folder / FILE)
    for name in list(weights):
        at = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in arrays:
            by = scale if isinstance(scale, float) else scale[name.split(".")[-2]]
            product = arrays[f"{at}B.weight"] @ arrays[f"{at}A.weight"]
            weights[name] = weights[name] + np.float32(by) * product
    save_file(weights, folder / FILE, {"format": "pt"})
    return folder


def agrees(result: Mapping[str, Any], expected: Any, few: float = 1e-3) -> bool:
    """Whether an output is the reference's greedy one, up to a position where either of two ids
    is right."""
    ids, entries = result["output_ids"], result["meta_info"]["output_token_logprobs"]
    for at, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        if token != expected.ids[at]:
            return expected.gaps[at] < few
        if abs(entry[0] - expected.logprobs[at]) > 1e-4:
            return False
    return True


def ids_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 250, length).tolist() for length in lengths]
