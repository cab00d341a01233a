"""Programs that engines have in common are traced and lowered once. A program that differs is
each engine's own."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import patches
from enginepool import EnginePool, toy
from enginepool.engine.common_programs import CommonPrograms, WithoutDevices, alike, share
from enginepool.engine.executable_cache import ExecutableCache
from tests.support.pools import SMALL, open_with

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# Upstream's own programs run only without steady decode.
UPSTREAMS = ["jitted_run_model", "jitted_sampler", "jitted_compute_logprobs", "top"]
FUNCTIONS = ["prefill", *(["step"] if patches.optimising() else UPSTREAMS)]
OURS = {f"jit({name})" for name in FUNCTIONS}


def mesh(device: int) -> Mesh:
    devices = np.array(jax.devices()[device]).reshape(1, 1)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def test_engines_are_lowered_once(
    monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache
) -> None:
    """This holds for every program of an engine, also for an engine of several devices."""
    seen: list[str] = []

    def listen(event: str, _: float, fun_name: str = "", **__: Any) -> None:
        if event == LOWERED and fun_name in OURS:
            seen.append(fun_name)

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for devices in (1, 2):
            seen.clear()
            # Nothing is traced yet, although other tests may have compiled it.
            open_with(monkeypatch, ExecutableCache(one_cache.serialized))
            with EnginePool(str(toy.checkpoint()), devices=devices, **SMALL) as pool:
                answers = pool.generate_all(["12+7=", "41+7="] * 3, {"temperature": 0})
            assert [answer["text"] for answer in answers] == ["19", "48"] * 3
            counts.append(sorted(seen))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert {*counts[0]} == OURS
    assert counts[0] == counts[1]


class Rotary:
    """Like objects in some of upstream's models: no module, and not equal to another object."""

    def __init__(self, base: float, device: int = 0) -> None:
        self.frequencies = np.arange(4) / base
        self.cached = jax.device_put(jnp.arange(3.0), jax.devices()[device])
        self.own = self


def captured(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Rotary(10.0), Rotary(10.0, device=1), id="objects"),
        pytest.param(captured([1, "a"]), captured([1, "a"]), id="functions"),
        pytest.param({"a": 1, "b": Rotary(2.0)}, {"b": Rotary(2.0), "a": 1}, id="order of names"),
        pytest.param(mesh(0).abstract_mesh, mesh(1).abstract_mesh, id="abstract meshes"),
    ],
)
def test_alike(one: Any, other: Any) -> None:
    assert alike(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("a", "b", id="text"),
        pytest.param(1, 1.0, id="type"),
        pytest.param(Rotary(10.0), Rotary(20.0), id="arrays"),
        pytest.param(np.zeros(2, np.int32), np.zeros(2, np.int64), id="dtypes"),
        pytest.param(np.zeros(2), np.zeros(3), id="shapes"),
        pytest.param([1, 2], [1, 2, 3], id="length"),
        pytest.param({"a": 1}, {"b": 1}, id="names"),
        pytest.param(captured(1), captured(2), id="what functions capture"),
        pytest.param(captured(1), lambda: 1, id="functions"),
        pytest.param(partial(min, 1), partial(min, 1), id="what cannot be looked at"),
        pytest.param(mesh(0), mesh(1), id="devices"),
        pytest.param(SimpleNamespace(mesh=mesh(0)), SimpleNamespace(mesh=mesh(1)), id="in objects"),
    ],
)
def test_unlike(one: Any, other: Any) -> None:
    assert not alike(one, other)
    assert alike(one, one)


def test_different_programs_are_made_again() -> None:
    programs = CommonPrograms()
    first = programs.common(["step", 1], object)
    assert programs.common(["step", 1], object) is first
    assert programs.common(["step", 2], object) is not first


@jax.tree_util.register_pytree_node_class
class Cache:
    """Like upstream's memory pools: the structure has the mesh of their devices."""

    def __init__(self, device: int) -> None:
        self.mesh, self.buffer = mesh(device), jnp.zeros(2)

    def tree_flatten(self) -> Any:
        aux = {"mesh": self.mesh, "sharding": NamedSharding(self.mesh, PartitionSpec("tensor"))}
        return [self.buffer], aux

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> "Cache":
        made = cls.__new__(cls)
        made.mesh, (made.buffer,) = aux["mesh"], leaves
        assert aux["sharding"].mesh == made.mesh
        return made


def test_a_program_is_given_no_device() -> None:
    caches = [Cache(0), Cache(1)]
    structures = [jax.tree.structure([WithoutDevices({"one": cache})]) for cache in caches]
    assert structures[0] == structures[1]
    inside: list[Any] = []
    jax.jit(lambda given: inside.append(given["one"].mesh) or given["one"].buffer)(
        WithoutDevices({"one": caches[1]})
    )
    assert inside == [caches[1].mesh.abstract_mesh]
    assert caches[1].mesh == mesh(1)


def test_functions_in_another_place_stay() -> None:
    runner = SimpleNamespace(jitted_run_model=print, jitted_sampler=print)
    before = vars(runner).copy()
    share(runner, CommonPrograms())
    assert vars(runner) == before
