"""Decides which files of a checkpoint directory are read, and reads a file's tensors."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from enginepool.errors import InvalidWeights
from enginepool.logs import logger
from enginepool.weights.name_mismatch import listed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

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
_OF_MANY = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def decide(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that are read, and the file of each tensor if there is an index.

    With an index, the files that it names are read. Without an index, `model.safetensors` alone is
    read, or, if it does not exist, every *.safetensors.

    Raises:
        InvalidWeights: There is no file, a file is missing, or the index is broken.
    """
    there = sorted(path.name for path in directory.glob("*.safetensors"))
    where: dict[str, str] = {}
    if (directory / INDEX).exists():
        where = _read_index(directory / INDEX)
        names = sorted(set(where.values()))
        for name in names:
            if not (directory / name).exists():
                lost = [tensor for tensor, file in where.items() if file == name]
                raise InvalidWeights(
                    f"{directory}: {name} is missing; {INDEX} names it for {listed(lost)}",
                    names=lost,
                )
    elif SINGLE in there:
        names = [SINGLE]
    else:
        names = there
        _check_numbers(directory, names)
    if not names:
        raise InvalidWeights(f"{directory}: no *.safetensors in this directory")
    if unread := [name for name in there if name not in names]:
        decided = INDEX if where else SINGLE
        logger().warning(
            "enginepool.files_not_read", directory=str(directory), files=unread, decided_by=decided
        )
    return [directory / name for name in names], where


def _read_index(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not where or not all(isinstance(name, str) for name in where.values()):
            raise ValueError("weight_map has no files")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InvalidWeights(f"{index}: not an index of weights: {error!r}") from error
    return where


def _check_numbers(directory: Path, names: list[str]) -> None:
    """Check that no numbered file is missing. Each file's name says how many there are."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_OF_MANY.fullmatch, names)):
        found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, count), numbers in found.items():
        if missing := sorted(set(range(1, int(count) + 1)) - numbers):
            files = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in missing]
            raise InvalidWeights(f"{directory}: missing {listed(files, 'file')}")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        code: The dtype, as safetensors writes it.
        offset: Where the tensor's bytes begin in the file.
    """

    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> Any:
        """The dtype for NumPy; `np.void` if it is unknown here."""
        return _DTYPES.get(self.code, np.void)


class TensorFile:
    """One safetensors file. Opening it reads its header, and nothing else.

    The file stays open, so that it can be read after another file has replaced it, or after it was
    deleted. It is not mapped into memory: if the file were truncated, reading a lost page would
    kill the process.

    Raises:
        InvalidWeights: The file is missing, truncated or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._fd)
            self._stamp = self._now()
            with safe_open(path, framework="numpy"):  # checks the header and the file's length
                length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
                header = json.loads(os.pread(self._fd, length, 8))
        except (SafetensorError, OSError, ValueError) as error:
            raise InvalidWeights(f"{path}: cannot be read: {error}") from error
        self.tensors = {
            name: _stored(entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def load(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Read a tensor, or some of its rows, into new memory.

        Raises:
            InvalidWeights: The file was changed since it was opened.
        """
        stored = self.tensors[name]
        shape, offset = stored.shape, stored.offset
        if rows != slice(None):
            start, stop, _ = rows.indices(shape[0])
            offset += start * (stored.nbytes // shape[0])
            shape = (stop - start, *shape[1:])
        data = np.empty(shape, stored.dtype)
        into, done = memoryview(data.reshape(-1).view(np.uint8)), 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                break
            done += count
        if self._now() != self._stamp:
            raise self._changed()
        return data

    def check_unchanged(self) -> None:
        """Check that the file was not changed while upstream read it by its name.

        Raises:
            InvalidWeights: The file was changed, replaced or deleted since it was opened.
        """
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            same = False
        if not same or self._now() != self._stamp:
            raise self._changed()

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns

    def _changed(self) -> InvalidWeights:
        return InvalidWeights(
            f"{self.path}: changed while it was read; write a checkpoint completely, or to another "
            "directory, before it is loaded"
        )


def _stored(entry: Mapping[str, Any], data: int) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
