"""Zero penalties are cached per device.

What breaks: With two engines on two devices in one process, the second one dies in its first
sampling step with "Received incompatible devices for jitted computation".

Why: A batch without penalties gets an array of zeros from a process-wide cache. In upstream of
January 2026 its key was the shape alone, so the second engine was handed the first one's array.

What we change: The cached array is used when it lies where it was asked for; otherwise one is
made there, and kept in a cache of our own whose key has the sharding. (The cache keeps those
arrays until the patch is reverted.)

Remove when: Every supported upstream has https://github.com/sgl-project/sglang-jax/pull/795.
"""

import threading
from types import SimpleNamespace

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.sampling.sampling_batch_info"


def _is_needed(original) -> bool:
    function = with_globals(
        original,
        _zero_linear_penalty_cache={},
        device_array=lambda array, sharding: SimpleNamespace(sharding=sharding),
    )
    return function((1, 1), "one device").sharding == function((1, 1), "another device").sharding


def _replace(original):
    cache = {}
    lock = threading.Lock()

    def get_or_create(shape, sharding):
        found = original(shape, sharding)
        if sharding is None or found.sharding == sharding:
            return found
        upstream = module(_MODULE)
        key = (int(shape[0]), int(shape[1]), sharding)
        with lock:
            if key not in cache:
                zeros = upstream.np.zeros(key[:2], dtype=upstream.np.float32)
                cache[key] = upstream.device_array(zeros, sharding=sharding)
            return cache[key]

    return get_or_create


PATCH = Patch(
    name="zero_penalty_cache",
    issue="https://github.com/sgl-project/sglang-jax/pull/795",
    replaced=(
        Target(_MODULE, "_get_or_create_zero_penalty_device", _replace, ("shape", "sharding")),
    ),
    probe=_is_needed,
)
