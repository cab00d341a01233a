"""An attention backend takes a step's metadata without flax's check.

What breaks: Nothing, but it is slow. At every step the thread that holds the GIL checks the same
kind of value, for longer than a transfer to the device takes.

Why: An attention backend is a flax module. Flax looks at every array of a value that is assigned to
an attribute, and the worker assigns `forward_metadata` at every step.

What we change: A value of the same type as the present one is stored without the check.

Remove when: Upstream passes the metadata in another way, or flax's check costs nothing.
"""

from typing import Any

from patches._lookup import module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.attention.base_attn_backend"
_ATTRIBUTE = "forward_metadata"


def _is_needed(original) -> bool:
    checked = []

    class Backend(module(_MODULE).AttentionBackend):
        def get_forward_metadata(self, batch: Any) -> None: ...

        def _check_value(self, key: str, *_: Any, **__: Any) -> None:
            checked.append(key)

    backend = Backend()
    for _ in range(2):
        original(backend, _ATTRIBUTE, None)
    return checked.count(_ATTRIBUTE) == 2


def _replace(original):
    def __setattr__(self, name, value):
        # `vars` finds neither a property nor an attribute that was never set.
        if name == _ATTRIBUTE and type(vars(self).get(name, self)) is type(value):
            object.__setattr__(self, name, value)
        else:
            original(self, name, value)

    return __setattr__


PATCH = Patch(
    name="metadata_check",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "AttentionBackend.__setattr__",
            _replace,
            ("self", "name", "value"),
            inherited=True,
        ),
    ),
    probe=_is_needed,
    optimisation=True,
)
