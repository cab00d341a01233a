"""A scheduler that opens no sockets makes no zmq context.

What breaks: A scheduler that gets its requests from a communication backend leaves a zmq context
behind, which gives a ResourceWarning wherever it happens to be collected.

Why: `Scheduler.__init__` makes the context before it knows whether it opens sockets, keeps it in a
local variable only, and never closes it.

What we change: The name `zmq` in that module stands for a namespace whose `Context` makes the real
one when something of it is first used; pyzmq itself is not touched.

Remove when: Upstream makes the context where it opens its sockets.
"""

from types import SimpleNamespace
from typing import Any

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.managers.scheduler"


class _Reached(Exception):
    """The constructor has come to the point after its sockets."""


class _Options:
    """Stands for ServerArgs, as far as the constructor reads them before that point."""

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


class _ZmqModule:
    """The zmq module, with another function in the place of `zmq.Context`."""

    def __init__(self, zmq):
        self._zmq = zmq

    def Context(self, *args, **kwargs):
        return _Context(lambda: self._zmq.Context(*args, **kwargs))

    def __getattr__(self, name):
        return getattr(self._zmq, name)


class _Context:
    """A zmq context that does not exist before it is used."""

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
    replaced=(Target(_MODULE, "zmq", _ZmqModule),),
    probe=_is_needed,
)
