"""A scheduler that opens no sockets makes no zmq context.

What breaks: A scheduler that gets its requests from a communication backend leaves a zmq context
behind. When it is collected, Python gives a ResourceWarning.

Why: `Scheduler.__init__` makes the context before it knows whether it opens sockets. It keeps the
context in a local variable and never closes it.

What we change: In that module the name `zmq` is a namespace whose `Context` makes the real one when
it is first used. pyzmq itself stays as it is.

Remove when: Upstream makes the context where it opens its sockets.
"""

from types import SimpleNamespace
from typing import Any

from patches._lookup import ModuleProxy, module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.managers.scheduler"


class _Reached(Exception):
    """The constructor is past its sockets."""


class _Options:
    """Stands for the ServerArgs that the constructor reads before it opens sockets."""

    node_rank = 0
    nnodes = 1

    def __getattr__(self, name):
        return None


class _Scheduler:
    """Stands for a scheduler that is being made."""

    def _setup_jit_cache(self, server_args): ...

    def init_tokenizer(self):
        raise _Reached


def _is_needed(_) -> bool:
    """Run the constructor with a communication backend, up to its sockets."""
    made = []
    init = vars(module(_MODULE).Scheduler)["__init__"]
    zmq = SimpleNamespace(Context=lambda *args, **kwargs: made.append(args))
    stand_ins = {"zmq": zmq, "os": SimpleNamespace(getenv=lambda name, default=None: default)}
    try:
        with_globals(init, **stand_ins)(_Scheduler(), _Options(), communication_backend=made)
    except _Reached:
        return bool(made)
    raise ValueError("the constructor makes no tokenizer")


def _replace(original):
    def context(*args, **kwargs):
        return _Context(lambda: original.Context(*args, **kwargs))

    return ModuleProxy(original, Context=context)


class _Context:
    """A zmq context that is made when it is first used."""

    def __init__(self, make):
        self._make = make
        self._made: Any = None

    def __getattr__(self, name):
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)


PATCH = Patch(
    name="unused_sockets",
    issue="not reported",
    replaced=(Target(_MODULE, "zmq", _replace),),
    probe=_is_needed,
)
