"""Checkpoints with another configuration, other tensors, or another layout of files.

`make` writes a checkpoint of random weights, as `make_random_model` does, with the given changes.
Its engines are compared with `reference_greedy`. The reference reads one file, so for a checkpoint
of several files it reads the plain checkpoint with the same weights.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.reference import make_random_model

FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "qwen3_moe")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

Tensors = dict[str, np.ndarray]


def make(
    folder: Path,
    family: str,
    *,
    config: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    edit: Callable[[Tensors], Tensors] | None = None,
    shards: int = 1,
    index: bool | None = None,
    strays: Mapping[str, Tensors] | None = None,
    **random: Any,
) -> Path:
    """Write a checkpoint.

    Args:
        config: Fields of config.json that are put over the family's own, as they are: shapes
            follow `random`, and not these.
        without: Fields that config.json does not have.
        edit: From the tensors by name to those that are written. See `renamed`, `dropped`, `cut`.
        shards: Into how many files they go, one after the other.
        index: Whether there is an index; by default where there are several files.
        strays: Further files, which no index names, by name.
        random: `make_random_model`'s: seed, num_layers, num_heads, num_kv_heads, std, tied, dtype.
    """
    make_random_model(folder, family, **random)
    set_config(folder, config or {}, without)
    tensors = load_file(folder / FILE)
    write_tensors(folder, edit(tensors) if edit else tensors, shards=shards, index=index)
    for name, stray in (strays or {}).items():
        save(folder / name, stray)
    return folder


def set_config(folder: Path, config: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
    """Change fields of a checkpoint's config.json."""
    set_json(folder / "config.json", config, without)


def set_json(file: Path, fields: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
    """Change fields of a JSON file, which need not be there."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    new = {name: value for name, value in old.items() if name not in without} | dict(fields)
    file.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


def write_tensors(
    folder: Path, tensors: Tensors, *, shards: int = 1, index: bool | None = None
) -> None:
    """Write a checkpoint's weights in the place of those that it has."""
    for old in (*folder.glob("*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    files = [FILE] if shards == 1 else [shard(i, shards) for i in range(shards)]
    names = list(tensors)
    where = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        save(folder / file, {name: tensors[name] for name in names if where[name] == file})
    if index if index is not None else shards > 1:
        write_index(folder, where)


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write an index: which tensor is in which file."""
    text = json.dumps({"metadata": {}, "weight_map": dict(weight_map)}, indent=2)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def save(file: Path, tensors: Tensors) -> None:
    """Write one file of tensors."""
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, file, {"format": "pt"})


def shard(index: int, count: int) -> str:
    """The name that transformers gives a file of several."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """For `edit`: every name that begins with `old` begins with `new` instead."""

    def edit(tensors: Tensors) -> Tensors:
        return {
            new + name.removeprefix(old) if name.startswith(old) else name: value
            for name, value in tensors.items()
        }

    return edit


def dropped(part: str) -> Callable[[Tensors], Tensors]:
    """For `edit`: without the tensors whose names have this part."""
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def cut(name: str, rows: int) -> Callable[[Tensors], Tensors]:
    """For `edit`: one tensor has only its first rows."""
    return lambda tensors: tensors | {name: tensors[name][:rows]}
