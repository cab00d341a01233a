"""Zero penalties are cached per device.

What breaks: With two engines on two devices of one process, the second fails in its first sampling
step: "Received incompatible devices for jitted computation".

Why: A batch without penalties gets zeros from a cache of the process. In January 2026 its key was
the shape alone, so the second engine got the first engine's array.

What we change: The cached array is used if it is on the right devices. Otherwise an array is made
there, and kept in our own cache, whose key has the sharding, until the patch is reverted.

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
