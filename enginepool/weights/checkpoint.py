"""A checkpoint directory in Hugging Face layout: safetensors, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from enginepool.errors import InvalidWeights

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Checkpoint:
    """The tensors of a directory by name. Opening it reads every file's header and nothing else.

    Raises:
        InvalidWeights: No such directory, no safetensors, a file that is missing, truncated or
            broken, a tensor that stands in two files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.specs: dict[str, jax.ShapeDtypeStruct] = {}
        self._handles = {}
        for file in _files(directory):
            try:
                handle = safe_open(file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise InvalidWeights(f"{file}: cannot be read: {error}") from error
            for name in handle.keys():  # noqa: SIM118  no dict
                if name in self._handles:
                    raise InvalidWeights(f"{file}: {name} stands in another file too", names=[name])
                self._handles[name] = handle
                part = handle.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype(), np.void)
                self.specs[name] = jax.ShapeDtypeStruct(tuple(part.get_shape()), dtype)

    def load(self, name: str) -> np.ndarray:
        """One tensor, in memory of its own."""
        data = self._handles[name].get_tensor(name)
        # safetensors without ml_dtypes gives bfloat16 as two bytes of anything.
        return data if data.dtype.kind != "V" else data.view(self.specs[name].dtype)


def find(source: str | Path, download_dir: str | None = None, revision: str | None = None) -> Path:
    """The directory that a path or a hub id means; a hub id is downloaded if it must be."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise InvalidWeights(f"{source}: no directory, and no hub id (owner/name)")
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
    except Exception as error:  # a dozen types of three libraries
        raise InvalidWeights(
            f"{source}: no such directory, and not to be had from the hub: {error}"
        ) from error


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidWeights(f"{index}: not an index of weights: {error!r}") from error
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise InvalidWeights(f"{directory}: the index names files that are missing: {missing}")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidWeights(f"{directory}: no *.safetensors in this directory")
    return files
