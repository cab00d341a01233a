"""Leaves in batches: a program and a call for many of them cost the host as much as for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

# Few enough that a program of them is compiled soon, and many enough that the calls do not count.
LEAVES = 32
# Of a second set, where a batch may be larger than the largest leaf.
BYTES = 64 << 20

_LAYER = re.compile(r"(.*?\.)(\d+)\.")


def batched[T](
    leaves: Iterable[T],
    path: Callable[[T], str],
    nbytes: Callable[[T], int],
    limit: int,
    most: int = LEAVES,
) -> Iterator[list[T]]:
    """Batches of at most so many bytes, or of one leaf, in their order.

    A batch has whole layers where they fit, and nothing beside layers. So most batches of a model
    are alike, and need one program.
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
        del leaf  # a stream may free it once its batch is done
    if whole or layer:
        yield whole + layer
