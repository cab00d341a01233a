"""Splits leaves into batches. For the host, a program for many leaves is as cheap as for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

# Leaves per batch: few enough to compile quickly, many enough to make few calls.
LEAVES = 32
# Bytes per batch with staging="double". With "stream" the limit is the largest leaf.
BYTES = 64 << 20

_LAYER = re.compile(r"(.*?\.)(\d+)\.")


def batched[T](
    leaves: Iterable[T],
    path: Callable[[T], str],
    nbytes: Callable[[T], int],
    limit: int,
    most: int = LEAVES,
) -> Iterator[list[T]]:
    """The leaves, in their order, in batches of at most `limit` bytes and `most` leaves. A larger
    leaf is a batch of its own.

    A batch has whole layers if they fit. Layers and other leaves are never in the same batch. So
    most batches of a model are equal and share one program.
    """
    whole: list[T] = []  # layers that are complete
    layer: list[T] = []
    size = 0
    now: tuple[str, str] = "", ""
    for leaf in leaves:
        match = _LAYER.match(path(leaf))
        before, now = now, (match[1], match[2]) if match else ("", "")
        if before != now:
            whole, layer = whole + layer, []
        new = nbytes(leaf)
        if whole and (
            before[0] != now[0] or (len(whole) + len(layer) >= most or size + new > limit)
        ):
            yield whole
            whole, size = [], sum(map(nbytes, layer))
        if layer and (len(layer) >= most or size + new > limit):
            yield layer
            layer, size = [], 0
        layer.append(leaf)
        size += new
        del leaf  # a stream can free the leaf when its batch is done
    if whole or layer:
        yield whole + layer
