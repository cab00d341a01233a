"""Records which fields of a model's configuration upstream reads while it builds an engine.

Reaches into upstream's ModelConfig: what is assigned to its `hf_config`.

What breaks: A setting that upstream does not compute is ignored silently.
Why: A model reads the fields that it knows. The others are ignored.
Remove when: Upstream refuses what it does not compute.

A list of what each family reads would be out of date with the next version. So while an engine is
built, the configuration's class is replaced by one that records each field that is read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from enginepool.engine.rotary_check import check_rotary
from enginepool.model_config.config_json import fields, parsed, written
from enginepool.model_config.unsupported import check_reads, refuse_unread
from enginepool.process.thread_override import ThreadOverride

if TYPE_CHECKING:
    from sgl_jax.srt.configs.model_config import ModelConfig
    from sgl_jax.srt.model_executor.model_runner import ModelRunner
    from sgl_jax.srt.server_args import ServerArgs


@contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Inside the block, record which fields are read from the `hf_config` of every ModelConfig that
    this thread makes."""
    notes = _Notes(set(), [])
    token = _notes.set(notes)
    try:
        with _override.on_this_thread():
            yield notes.reads
    finally:
        _notes.reset(token)
        for config, own in notes.configs:
            config.__class__ = own
            vars(config).pop(_READS, None)


class _Notes(NamedTuple):
    reads: set[str]
    configs: list[tuple[Any, type]]


_notes: ContextVar[_Notes | None] = ContextVar("notes", default=None)


def _install() -> Callable[[], None]:
    from sgl_jax.srt.configs import model_config

    # A property has precedence over the attribute of that name, which keeps the value.
    kind: Any = model_config.ModelConfig
    kind.hf_config = property(lambda self: vars(self)["hf_config"], _assign)

    def restore() -> None:
        del kind.hf_config

    return restore


_override = ThreadOverride(_install)


def _assign(model_config: ModelConfig, config: Any) -> None:
    vars(model_config)["hf_config"] = config
    notes = _notes.get()
    if notes is not None and type(config).__module__ != __name__:
        notes.configs.append((config, type(config)))
        config.__class__ = _noting(type(config))
        object.__setattr__(config, _READS, notes.reads)


def check_made(server_args: ServerArgs) -> None:
    """Check the model that this thread has just made: it must have read every field of its
    configuration that matters. Called before the weights are read.

    Raises:
        InvalidConfig: The model has not read a field. The error names it.
    """
    notes = _notes.get()
    if notes is not None:
        refuse_unread(_fields(server_args), notes.reads)


def _fields(server_args: ServerArgs) -> dict[str, Any]:
    config = written(server_args.model_path, server_args.revision)
    return fields(config, server_args.json_model_override_args)


def check_model(runner: ModelRunner, server_args: ServerArgs, reads: Collection[str]) -> None:
    """Check that a built engine computes what its model's configuration says.

    Raises:
        InvalidConfig: It does not; the error names the field.
    """
    config = _fields(server_args)
    check_rotary(runner.model, vars(parsed(config)))
    check_reads(config, reads, caps=_caps(runner))


def _caps(runner: ModelRunner) -> bool:
    """Whether the attention can cap its logits. Native attention can if it takes the cap."""
    from sgl_jax.srt.layers.attention import native_backend

    native = isinstance(runner.attn_backend, native_backend.NativeAttention)
    parameters = inspect.signature(native_backend.forward_attention).parameters
    return not native or any("cap" in name for name in parameters)


_READS = "_enginepool_reads"


@functools.cache
def _noting(own: type) -> type:
    original: Any = own.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        reads = object.__getattribute__(self, "__dict__").get(_READS)
        if reads is not None and not name.startswith("_"):
            reads.add(name)
        return original(self, name)

    return type(
        own.__name__, (own,), {"__getattribute__": __getattribute__, "__module__": __name__}
    )
