"""Checks a head that a source has beside a tied embedding. The model has one matrix for both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.errors import InvalidWeights
from enginepool.weights.arrays import Array, convertible, jax_dtype, outside_meshes
from enginepool.weights.placement import place

HEAD = "lm_head.weight"
_ROWS = 4096


class TiedHead:
    """Compares the head with the embedding, in the model's dtype. State dicts of models with tied
    embeddings have both.

    Attributes:
        path: The embedding's leaf path; None if there is nothing to compare.
    """

    def __init__(self, specs: Any) -> None:
        paths = [path for path in specs if path.endswith("embed_tokens.embedding")]
        tied = "lm_head.embedding" not in specs and len(paths) == 1
        self.path = paths[0] if tied else None
        self._dtype = specs[paths[0]].dtype if tied else None
        self._head: Array | None = None
        self._embedding: Array | None = None

    def compare(self, head: Array, embedding: Array, said: str = HEAD) -> None:
        """
        Args:
            said: The head's name in the source.

        Raises:
            InvalidWeights: The head and the embedding differ.
        """
        if not self.equal(head, embedding):
            raise InvalidWeights(
                f"{said}: differs from the embedding, and this model has one matrix for both "
                "(tie_word_embeddings); leave it out, or ignore it with strict=False",
                names=[said],
            )

    def equal(self, head: Array, embedding: Array) -> bool:
        """Whether head and embedding are equal in the model's dtype."""
        return convertible(head.dtype, self._dtype) and _same(head, embedding, self._dtype)

    # For a stream, whose tensors come in any order

    def came(self, name: str, tensor: Array) -> None:
        """Take a tensor that makes no leaf. A head is kept until the embedding comes."""
        if self.path is None or name != HEAD:
            return
        if self._embedding is not None:
            self.compare(tensor, self._embedding)
        else:
            self._head = tensor

    def made(self, leaf: jax.Array) -> None:
        """Take the embedding's leaf, which is on an engine."""
        head, self._head, self._embedding = self._head, None, leaf
        if head is not None:
            self.compare(head, leaf)

    def forget(self) -> None:
        """Drop both, because the stream has ended."""
        self._head = self._embedding = None


def _same(a: Array, b: Array, dtype: Any) -> bool:
    if a is b or a.shape != b.shape:
        return a is b
    a, b = _computable(a), _computable(b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        parts = (slice(start, start + _ROWS) for start in range(0, len(a), _ROWS))
        return all(bool(_equal(a[part].astype(dtype), b[part].astype(dtype))) for part in parts)
    if isinstance(a, np.ndarray):
        a, b = b, a
    assert isinstance(a, jax.Array)
    one = a.addressable_shards[0].data if a.is_fully_replicated else a  # one of the copies
    there = place(b, one.sharding, jax_dtype(b.dtype), private=True)
    # Part by part: a program over several devices and an engine's might wait for each other.
    parts = zip(one.addressable_shards, there.addressable_shards, strict=True)
    with outside_meshes():
        equal = [equal_on_devices(x.data, y.data, dtype) for x, y in parts]
    return all(jax.device_get(equal))


def _computable(array: Array) -> Array:
    """The array, or a NumPy array if it lies in host memory, where programs do not compute."""
    if isinstance(array, np.ndarray):
        return array
    (device, *_) = array.sharding.device_set
    there = array.sharding.memory_kind
    return array if there == device.default_memory().kind else np.asarray(array)


def _equal(a: Any, b: Any) -> Any:
    """Whether all values are equal. NaN counts as equal to NaN."""
    return ((a == b) | ((a != a) & (b != b))).all()


@functools.partial(jax.jit, static_argnums=2)
def equal_on_devices(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Whether two arrays on one device have the same values in this dtype."""
    return _equal(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
