"""Every model has a configuration of its own.

What breaks: After a quantized engine, every engine of the same model in this process is quantized,
whatever its options say.

Why: `get_config` caches the object that it returns, and `ModelConfig` writes its
`quantization_config` into that object.

What we change: `ModelConfig` gets a copy.

Remove when: `ModelConfig` copies what it gets.
"""

import copy
import functools

from patches._lookup import constructed, module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.configs.model_config"


class _FirstUse(Exception):
    pass


class _Config:
    """Raises at its first use, and says which use it was."""

    def __deepcopy__(self, memo):
        raise _FirstUse("copied")

    def __getattr__(self, name):
        raise _FirstUse("read")


def _is_needed(_) -> bool:
    """Construct a `ModelConfig` until it copies its configuration or reads it."""
    owner = module(_MODULE).ModelConfig
    constructor = with_globals(owner.__init__, get_config=lambda *_, **__: _Config())
    try:
        constructed(owner, constructor, "")
    except _FirstUse as use:
        return str(use) == "read"
    return False


def _replace(original):
    @functools.wraps(original)
    def get_config(*args, **kwargs):
        return copy.deepcopy(original(*args, **kwargs))

    return get_config


PATCH = Patch(
    name="shared_config",
    issue="not reported",
    replaced=(Target(_MODULE, "get_config", _replace),),
    probe=_is_needed,
)
