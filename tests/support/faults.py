"""Faults put into running engines from outside, through upstream's own objects, as hardware or a
bug would do it. Each happens once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from enginepool import EnginePool
from enginepool.engine.common_programs import OnAnyDevice
from enginepool.engine.device_wait import DeviceWait


class Fault(RuntimeError):
    """What the faults raise."""


class Hang(threading.Event):
    """What hangs goes on when this is set.

    Attributes:
        begun: Set once it hangs; what began before is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()


def scheduler_of(pool: EnginePool, engine_index: int) -> Any:
    return pool.engines[engine_index].scheduler_info["scheduler"]


def every_step(scheduler: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Put `change(what begins a step)` in its place, for upstream's own and for those in flight.

    Returns:
        Puts back what was there.
    """
    return _everywhere(_steps(scheduler), change)


def every_prefill(scheduler: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Put `change(what begins a prefill)` in its place. See `every_step`."""
    steady = scheduler.steady.prefill is not None
    place = (scheduler.prefill_program, "launch")
    return _everywhere(
        [place if steady else (scheduler.tp_worker, "forward_batch_generation")], change
    )


def _steps(scheduler: Any) -> list[tuple[Any, str]]:
    places: list[tuple[Any, str]] = [(scheduler.tp_worker, "forward_batch_generation")]
    if (program := scheduler.steady.program) is not None:
        places.append((program, "step"))
    if scheduler.steady.prefill is not None:
        places.append((scheduler.prefill_program, "launch"))
    return places


def _everywhere(places: list[tuple[Any, str]], change: Callable[[Any], Any]) -> Callable[[], None]:
    before = [vars(owner).get(name) for owner, name in places]  # what someone else put there
    for owner, name in places:
        setattr(owner, name, change(getattr(owner, name)))

    def undo() -> None:
        for (owner, name), original in zip(places, before, strict=True):
            if original is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, original)

    return undo


def once(places: list[tuple[Any, str]], at: int, wrong: Callable[..., Any], times: int = 1) -> None:
    """Let the so-manieth call of one of these methods from now be `wrong(original, *args)`, and so
    many in all."""
    calls = 0

    def change(original: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < at:
                return original(*args, **kwargs)
            if calls == at + times - 1:
                undo()
            return wrong(original, *args, **kwargs)

        return counting

    undo = _everywhere(places, change)


def raise_in_step(
    pool: EnginePool, engine_index: int, at: int = 1, error: BaseException | None = None
) -> None:
    """The forward raises before it runs."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise error or Fault(f"device {engine_index} is gone")

    once(_steps(scheduler_of(pool, engine_index)), at, wrong)


def raise_after_step(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """The forward has run and written the KV cache; its result is lost."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the result of device {engine_index} is lost")

    once(_steps(scheduler_of(pool, engine_index)), at, wrong)


def raise_after_bookkeeping(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """The outputs have been handed over and the scheduler then trips."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the requests of engine {engine_index} are wrong")

    scheduler = scheduler_of(pool, engine_index)
    places = [(scheduler, "process_batch_result"), (scheduler.steady, "append")]
    once(places, at, wrong)


def delete_kv_cache(pool: EnginePool, engine_index: int) -> None:
    """The KV buffers are gone, as after a step that donated them and failed."""
    for buffer in scheduler_of(
        pool, engine_index
    ).tp_worker.worker.model_runner.token_to_kv_pool.kv_buffer:
        buffer.delete()


def delete_leaf(pool: EnginePool, engine_index: int, leaf: int = 3) -> None:
    """A weight is gone that nobody shared."""
    scheduler_of(pool, engine_index).tp_worker.worker.model_runner.model_state_leaves[leaf].delete()


def spoil_leaf(pool: EnginePool, engine_index: int, leaf: int = 3) -> None:
    """A weight is no finite number any more."""
    leaves = scheduler_of(pool, engine_index).tp_worker.worker.model_runner.model_state_leaves
    leaves[leaf] = leaves[leaf] * jnp.nan


def hang_in_step(pool: EnginePool, engine_index: int, at: int = 1) -> Hang:
    """The forward does not return until the event is set."""
    return _hang(_steps(scheduler_of(pool, engine_index)), at)


def abandon(pool: EnginePool, hang: Hang, engine_index: int) -> None:
    """Once it hangs, do what the watchdog does after `step_timeout`."""
    assert hang.begun.wait(120.0)
    worker = pool.runtime.workers[engine_index]
    since = worker.condition.stepping_since
    assert since is not None
    pool.runtime.recovery.engine_stuck(worker, since, "a step has not returned")


def raise_in_score(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """A piece of prompts that are scored has been computed; its result is lost."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the scores of device {engine_index} are lost")

    once([(scheduler_of(pool, engine_index).scorer.program, "run")], at, wrong)


def hang_in_score(pool: EnginePool, engine_index: int, at: int = 1) -> Hang:
    """A piece of prompts that are scored is not computed until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).scorer.program, "run")], at)


def hang_in_reset(pool: EnginePool, engine_index: int) -> Hang:
    """The next time the KV cache is to be made anew, that takes until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).kv_cache, "renew")])


def hang_in_commit(pool: EnginePool, engine_index: int) -> Hang:
    """The next time new weights are put in place, that takes until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).leaves, "replace")])


def _hang(places: list[tuple[Any, str]], at: int = 1) -> Hang:
    let_go = Hang()

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        let_go.begun.set()
        let_go.wait()
        return original(*args, **kwargs)

    once(places, at, wrong)
    return let_go


def raise_in_reset(pool: EnginePool, engine_index: int) -> None:
    """The next time the KV cache is to be made anew, that fails."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"device {engine_index} gives no memory")

    once([(scheduler_of(pool, engine_index).kv_cache, "renew")], 1, wrong)


def raise_in_commit(pool: EnginePool, engine_index: int, times: int = 1) -> None:
    """The next times new weights are put in place, that fails."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"device {engine_index} does not take weights")

    once([(scheduler_of(pool, engine_index).leaves, "replace")], 1, wrong, times)


def raise_in_decode(pool: EnginePool) -> None:
    """The tokenizer trips over the next output."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault("the tokenizer is broken")

    once([(pool.engines[0].tokenizer_manager.tokenizer, "decode")], 1, wrong)


def placed_on(where: Any) -> set[int]:
    """The ids of the devices that a `device_put` of one array or of many is for."""
    places = where if isinstance(where, list) else [where]
    return {device.id for place in places for device in getattr(place, "device_set", ())}


@contextmanager
def refusing_devices() -> Iterator[set[int]]:
    """Add a device's id to the set, and the next `device_put` onto it raises. So does the next of a
    single array, if that was one of many: these are tried one by one then."""
    refusing: set[int] = set()
    device_put = jax.device_put

    def put(x: Any, device: Any = None, **options: Any) -> Any:
        for refused in refusing & placed_on(device):
            if not isinstance(device, list) or len(device) == 1:
                refusing.discard(refused)
            raise Fault(f"device {refused} takes nothing")
        return device_put(x, device, **options)

    jax.device_put = put
    try:
        yield refusing
    finally:
        jax.device_put = device_put


@contextmanager
def dead_devices() -> Iterator[set[int]]:
    """Add a device's id to the set, and from then on everything that is asked of it raises, as when
    a GPU's context is lost or a TPU has halted. Nothing but a new process would bring it back."""
    dead: set[int] = set()

    def check(devices: Any) -> None:
        if gone := sorted(device.id for device in devices if device.id in dead):
            raise jax.errors.JaxRuntimeError(
                f"INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: illegal memory access on device {gone[0]}"
            )

    def check_arrays(args: Any) -> None:
        for array in jax.tree.leaves(args):
            if isinstance(array, jax.Array) and not array.is_deleted():
                check(array.sharding.device_set)

    def put(aval: Any, sharding: Any, arrays: Any, devices: Any, *args: Any, **options: Any) -> Any:
        check(devices)
        return original_put(aval, sharding, arrays, devices, *args, **options)

    def call(self: Any, *args: Any) -> Any:
        check_arrays(args)
        return original_call(self, *args)

    def run(self: Any, *args: Any, **options: Any) -> Any:
        check(jax.tree.leaves(self.output_shardings)[0].device_set)
        return original_run(self, *args, **options)

    def wait(self: Any, result: Any) -> None:
        check_arrays(result)
        original_wait(self, result)

    original_put: Callable[..., Any] = xla_client.batched_device_put
    original_call, original_run = OnAnyDevice.__call__, jax.stages.Compiled.__call__
    original_wait = DeviceWait.until_ready
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_client, "batched_device_put", put)
        patch.setattr(OnAnyDevice, "__call__", call)
        patch.setattr(jax.stages.Compiled, "__call__", run)
        patch.setattr(DeviceWait, "until_ready", wait)
        yield dead
