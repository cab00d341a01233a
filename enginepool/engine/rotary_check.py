"""Checks that a model rotates queries and keys by the frequencies of its configuration.

Reaches into upstream's models: the layers' `self_attn.rotary_emb`.

What breaks: Wrong frequencies go unnoticed: outputs stay plausible, but the trainer's policy is
another one.
Why: Upstream ignores settings that it does not know, and computes others wrongly. Known cases are
repaired in `patches/`. This check finds the next case.
Remove when: Never. If upstream's models have other parts, the log says that they are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.engine.common_programs import alike
from enginepool.errors import InvalidConfig
from enginepool.logs import logger
from enginepool.model_config import FAMILIES
from enginepool.model_config.rotary import Rotation, rotation

# Each entry is compared at about these angles, in radians. The first shows a wrong scale or kind,
# the second shows rounding. float32 is exact to 1e-5 there.
_RADIANS = (1.0, 64.0)
_TOLERANCE = 1e-3


def check_rotary(model: Any, fields: Mapping[str, Any]) -> None:
    """Rotate a vector by each layer's own embedding, and compare with the published formula.

    Args:
        fields: The fields of config.json. Upstream's configuration object is not used, because
            upstream's Llama changes `rope_scaling` in it.

    Raises:
        InvalidConfig: The results differ, or config.json asks for what engines do not implement.
    """
    if fields["model_type"] not in FAMILIES:
        return
    try:
        embeddings = [layer.self_attn.rotary_emb for layer in model.model.layers]
    except AttributeError as error:
        logger().warning("enginepool.rotary_not_checked", why=str(error))
        return
    seen: list[tuple[Any, Rotation]] = []
    for layer, embedding in enumerate(embeddings):
        expected = rotation(fields, layer)
        if not any(alike(embedding, one) and _same(expected, other) for one, other in seen):
            _check(embedding, expected, layer, fields)
            seen.append((embedding, expected))


def _same(one: Rotation, other: Rotation) -> bool:
    return one.scale == other.scale and np.array_equal(one.frequencies, other.frequencies)


def _check(embedding: Any, expected: Rotation, layer: int, fields: Mapping[str, Any]) -> None:
    frequencies, scale = expected
    for radians in _RADIANS:
        positions = np.maximum(1, np.round(radians / frequencies)).astype(np.int64)
        positions = np.minimum(positions, np.iinfo(np.int32).max).astype(np.int32)
        cosine, sine = _rotated(embedding, positions, len(frequencies))
        angles = positions * frequencies
        limit = scale * (_TOLERANCE + float(jnp.finfo(embedding.dtype).eps))
        wrong = np.maximum(
            np.abs(cosine - scale * np.cos(angles)), np.abs(sine - scale * np.sin(angles))
        )
        # A NaN is wrong, too.
        if not (wrong <= limit).all():
            names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
            asked = ", ".join(f"{n}={fields[n]!r}" for n in names if fields.get(n) is not None)
            entry = int(np.argmax(~(wrong <= limit)))
            raise InvalidConfig(
                f"the rotary embedding of layer {layer} differs from config.json ({asked}): entry "
                f"{entry} of a head, at position {positions[entry]}, is off by "
                f"{wrong[entry]:.3g}. This sglang-jax does not implement these settings"
            )


def _rotated(embedding: Any, positions: np.ndarray, entries: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each entry at its own position: (1, 0) rotated."""
    head = np.zeros((len(positions), embedding.head_size), np.float32)
    head[:, :entries] = 1.0
    rotated, _ = jax.jit(embedding)(positions, head, head)
    rotated, own = np.asarray(rotated), np.arange(entries)
    return rotated[own, own], rotated[own, own + entries]
