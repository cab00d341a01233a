"""A checkpoint directory in Hugging Face layout: safetensors, sharded or not.

`files.decide` says which files are read. Opening a pool, an update and `enginepool.reference` all
use it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from enginepool.errors import InvalidWeights
from enginepool.weights.files import INDEX, TensorFile, decide


class Checkpoint:
    """The tensors of a directory by name. Opening it reads every file's header and nothing else.

    Raises:
        InvalidWeights: The directory does not exist or has no safetensors file. A file is missing,
            truncated or broken. A tensor is not in the file that the index names, or is in two
            files, and no index says which of them is read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, TensorFile] = {}
        self._opened: list[TensorFile] = []
        paths, where = decide(directory)
        for path in paths:
            file = TensorFile(path)
            self._opened.append(file)
            for name in file.tensors:
                if name in where and directory / where[name] != path:
                    continue  # the index names another file for it
                if name in self._files:
                    raise InvalidWeights(
                        f"{path}: {name} is also in {self._files[name].path.name}, and no "
                        f"{INDEX} says which of the two is read",
                        names=[name],
                    )
                self._files[name] = file
        if lost := [name for name in where if name not in self._files]:
            raise InvalidWeights(
                f"{directory}: {INDEX} names {where[lost[0]]} for {lost[0]}, and that file does "
                "not have it",
                names=lost,
            )
        self.specs = {
            name: jax.ShapeDtypeStruct(file.tensors[name].shape, file.tensors[name].dtype)
            for name, file in self._files.items()
        }

    def load(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Read one tensor, or some of its rows, into new memory.

        Raises:
            InvalidWeights: The file was changed since it was opened.
        """
        return self._files[name].load(name, rows)

    def places(self) -> dict[str, list[dict[str, Any]]]:
        """Where each tensor lies, in the form of upstream's `WeightLoader._scan_weight_info`."""
        return {
            name: [
                {
                    "file": str(file.path),
                    "shape": file.tensors[name].shape,
                    "dtype": file.tensors[name].code,
                    "byte_offset": file.tensors[name].offset,
                    "byte_size": file.tensors[name].nbytes,
                }
            ]
            for name, file in self._files.items()
        }

    def check_unchanged(self) -> None:
        """Check that no file was changed while upstream read the files by their names.

        Raises:
            InvalidWeights: A file was changed, replaced or deleted.
        """
        for file in self._opened:
            file.check_unchanged()


def layers_left_out(directory: Path, layers: int) -> tuple[str, ...]:
    """The name prefixes of layers that the checkpoint has and an engine of so many layers does not
    load: those that the engine was told to leave out, and those for multi-token prediction."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        more = config.get("num_nextn_predict_layers") or 0
        have = (config.get("num_hidden_layers") or layers) + more
    except (OSError, ValueError, TypeError, AttributeError):
        return ()  # without a configuration, or with a broken one
    return tuple(f"model.layers.{index}." for index in range(layers, have))


def find(source: str | Path, download_dir: str | None = None, revision: str | None = None) -> Path:
    """The directory of a path or a hub id. A hub id that is not in the cache is downloaded."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise InvalidWeights(f"{source}: neither a directory nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download  # needed for hub ids only

    try:
        return Path(
            snapshot_download(
                str(source),
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=["*.safetensors", "*.json"],
            )
        )
    except Exception as error:  # the hub's client raises a dozen types
        raise InvalidWeights(
            f"{source}: no such directory, and it cannot be got from the hub: {error}"
        ) from error
