"""Traces and lowers each program once for all engines of a pool.

Reaches into upstream's model runner: its jitted functions, and the objects that these get.

What breaks: Without this every engine traces and lowers each program for itself. That is Python, so
engines do it one after the other: eight engines take eight times as long.
Why: Upstream makes new functions for every model runner, and models, attention backends and memory
pools bring the mesh of their own devices into a trace. JAX reuses a trace and its lowering for
another device if the function is the same and no mesh in it names a device.
Remove when: Upstream's functions belong to modules, and its models have abstract meshes.

If a program differs between two engines in more than the devices, each engine has its own. The same
happens if this upstream keeps its functions elsewhere.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

if TYPE_CHECKING:
    from sgl_jax.srt.layers.logits_processor import LogitsMetadata
    from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


class CommonPrograms:
    """The programs that engines share. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[Any, Any]] = []

    def common(self, likeness: Any, make: Callable[[], Any]) -> Any:
        """Return what an earlier call made for an equal `likeness`. If there was none, call `make`.

        Args:
            likeness: Everything that the result depends on; compared by `alike`.
        """
        with self._lock:
            for known, made in self._known:
                if alike(known, likeness):
                    return made
            made = make()
            self._known.append((likeness, made))
            return made

    def split(self, module: Any) -> tuple[Any, Any]:
        """Split a module by `nnx.split`. The definition names no device, and engines share it. The
        state is the module's own."""
        from flax import nnx  # not with the package: it takes a second

        with _without_devices(module):
            definition, state = nnx.split(module)
        return self.common(definition, lambda: definition), state


def share(runner: ModelRunner, programs: CommonPrograms) -> None:
    """Replace upstream's functions by those that engines share."""
    model, sampler = runner.jitted_run_model, runner.jitted_sampler
    captured = inspect.getclosurevars(model).nonlocals if isinstance(model, FunctionType) else {}
    known = {"jitted_run_model", "model_def", "model_state_def", "self"}
    if captured.keys() != known or not isinstance(sampler, partial) or len(sampler.args) != 4:
        return
    run_model = _common_function(programs, captured["jitted_run_model"])
    structure = captured["model_state_def"]
    definition, _ = programs.split(runner.model)

    def run(forward_batch: ForwardBatch, logits_metadata: LogitsMetadata) -> Any:
        backend: Any = WithoutDevices(forward_batch.attn_backend)
        forward_batch.attn_backend = backend
        return run_model(
            definition,
            structure,
            runner.model_state_leaves,
            forward_batch,
            WithoutDevices(runner.memory_pools),
            logits_metadata,
        )

    runner.jitted_run_model = run
    sampler_definition, _ = programs.split(runner.sampler)
    runner.jitted_sampler = partial(
        _common_function(programs, sampler.func), sampler_definition, *sampler.args[1:]
    )
    logprobs = runner.jitted_compute_logprobs
    runner.jitted_compute_logprobs = partial(
        _common_function(programs, logprobs.func), *map(without_devices, logprobs.args)
    )


def _common_function(programs: CommonPrograms, jitted: Any) -> OnAnyDevice:
    return programs.common(jitted.__wrapped__, lambda: OnAnyDevice(jitted))


class OnAnyDevice:
    """A jitted function that is called without the default device of an engine's thread. JAX would
    make that device a part of the trace. All arguments that matter are on their devices."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __call__(self, *args: Any) -> Any:
        with jax.default_device(None):
            return self._jitted(*args)

    def eval_shape(self, *args: Any) -> Any:
        """The shapes of what such a call returns."""
        with jax.default_device(None):
            return self._jitted.eval_shape(*args)

    def compile(self, *args: Any) -> None:
        """Compile what such a call runs. For an array, its shape and sharding suffice."""
        with jax.default_device(None):
            self._jitted.lower(*args).compile()


@jax.tree_util.register_pytree_node_class
class WithoutDevices:
    """Wraps an object that is an argument of a program. The program gets the object itself, on an
    abstract mesh."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, structure = jax.tree.flatten(self._whole)
        return leaves, structure_without_devices(structure)

    @staticmethod
    def tree_unflatten(structure: Any, leaves: Any) -> Any:
        return jax.tree.unflatten(structure, leaves)


def structure_without_devices(structure: Any) -> Any:
    """The same structure, with abstract meshes."""
    data = structure.node_data()
    if data is None:  # a leaf, or None
        return structure
    kind, more = data
    children = list(map(structure_without_devices, structure.children()))
    return type(structure).from_node_data_and_children(
        jax.tree_util.default_registry, (kind, without_devices(more)), children
    )


def without_devices(value: Any) -> Any:
    """The value with abstract meshes; the value itself if it has no mesh."""
    if isinstance(value, Mesh):
        return value.abstract_mesh
    # An abstract mesh has one kind of memory. A sharding in another kind keeps its devices.
    if isinstance(value, NamedSharding) and value == NamedSharding(value.mesh, value.spec):
        return NamedSharding(without_devices(value.mesh), value.spec)
    if type(value) is tuple:
        return tuple(map(without_devices, value))
    if type(value) is dict:
        return {key: without_devices(one) for key, one in value.items()}
    return value


@contextmanager
def _without_devices(module: Any) -> Iterator[None]:
    """Inside the block the module has abstract meshes. Upstream's host code needs concrete ones."""
    from flax import nnx

    replaced = []
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, (Mesh, NamedSharding)):
                    replaced.append((vars(node), name, value))
                    vars(node)[name] = without_devices(value)
    try:
        yield
    finally:
        for attributes, name, value in replaced:
            attributes[name] = value


def alike(one: object, other: object) -> bool:
    """Whether two objects give the same trace: they are equal, or of one type with parts that are
    alike."""
    return _alike(one, other, {})


def _alike(one: Any, other: Any, begun: dict[tuple[int, int], Any]) -> bool:
    if one is other or (pair := (id(one), id(other))) in begun:  # or a cycle
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, jax.Array)):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if not isinstance(one, FunctionType) and _equal(one, other):
        return True
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return False
        parts, others = list(one.values()), [other[key] for key in one]
    else:
        parts, others = _parts(one), _parts(other)
    if parts is None or others is None or len(parts) != len(others):
        return False
    begun[pair] = one, other, parts, others  # kept, so that no id is reused
    return all(_alike(*both, begun) for both in zip(parts, others, strict=True))


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # there are arrays in them
        return False


def _parts(whole: object) -> list[Any] | None:
    """The parts of an object; None if they are unknown."""
    if isinstance(whole, (list, tuple)):
        return list(whole)
    if isinstance(whole, FunctionType):
        cells = [cell.cell_contents for cell in whole.__closure__ or ()]
        return [whole.__code__, cells, whole.__defaults__, whole.__kwdefaults__]
    kind = type(whole)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return None
    try:  # pickle's protocol: how to make a copy, and the state that it gets
        _, given, state, *_ = whole.__reduce_ex__(4)
    except TypeError:
        return None
    return [state] if given == (kind,) and kind is not Mesh else None
