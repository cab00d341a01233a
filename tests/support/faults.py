"""Faults that are put into running engines from outside, through upstream's own objects, as
hardware or a bug would cause them. Each happens once."""

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
    """The exception that faults raise."""


class Hang(threading.Event):
    """Ends a hang when it is set.

    Attributes:
        begun: Set once the hang has begun, so everything before it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()


def scheduler_of(pool: EnginePool, engine_index: int) -> Any:
    return pool.engines[engine_index].scheduler_info["scheduler"]


def every_step(scheduler: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the method that begins a step by `change(method)`, for upstream's own steps and for
    those in flight.

    Returns:
        A function that restores the methods.
    """
    return _everywhere(_steps(scheduler), change)


def every_prefill(scheduler: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the method that begins a prefill by `change(method)`. See `every_step`."""
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
    before = [vars(owner).get(name) for owner, name in places]  # other tests may have replaced it
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
    """Replace call number `at` from now of one of these methods by `wrong(original, *args)`, and
    `times` calls in all."""
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
    """The forward has run and has written the KV cache. Its result is lost."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the result of device {engine_index} is lost")

    once(_steps(scheduler_of(pool, engine_index)), at, wrong)


def raise_after_bookkeeping(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """The outputs have been handed over, and then the scheduler fails."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the requests of engine {engine_index} are wrong")

    scheduler = scheduler_of(pool, engine_index)
    places = [(scheduler, "process_batch_result"), (scheduler.steady, "append")]
    once(places, at, wrong)


def delete_kv_cache(pool: EnginePool, engine_index: int) -> None:
    """The KV buffers are deleted, as after a step that donated them and failed."""
    for buffer in scheduler_of(
        pool, engine_index
    ).tp_worker.worker.model_runner.token_to_kv_pool.kv_buffer:
        buffer.delete()


def delete_leaf(pool: EnginePool, engine_index: int, leaf: int = 3) -> None:
    """A weight that nobody shared is deleted."""
    scheduler_of(pool, engine_index).tp_worker.worker.model_runner.model_state_leaves[leaf].delete()


def spoil_leaf(pool: EnginePool, engine_index: int, leaf: int = 3) -> None:
    """A weight becomes NaN."""
    leaves = scheduler_of(pool, engine_index).tp_worker.worker.model_runner.model_state_leaves
    leaves[leaf] = leaves[leaf] * jnp.nan


def hang_in_step(pool: EnginePool, engine_index: int, at: int = 1) -> Hang:
    """The forward does not return until the event is set."""
    return _hang(_steps(scheduler_of(pool, engine_index)), at)


def abandon(pool: EnginePool, hang: Hang, engine_index: int) -> None:
    """Once the step hangs, do what the watchdog does after `step_timeout`."""
    assert hang.begun.wait(120.0)
    worker = pool.runtime.workers[engine_index]
    since = worker.condition.stepping_since
    assert since is not None
    pool.runtime.recovery.engine_stuck(worker, since, "a step has not returned")


def raise_in_score(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """A piece of a prompt has been scored. Its result is lost."""

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise Fault(f"the scores of device {engine_index} are lost")

    once([(scheduler_of(pool, engine_index).scorer.program, "run")], at, wrong)


def hang_in_score(pool: EnginePool, engine_index: int, at: int = 1) -> Hang:
    """A piece of a prompt is not scored until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).scorer.program, "run")], at)


def hang_in_admission(pool: EnginePool, engine_index: int) -> Hang:
    """The engine takes the next request, and does not admit it until the event is set."""
    return _hang([(scheduler_of(pool, engine_index), "admit")])


def hang_in_reset(pool: EnginePool, engine_index: int) -> Hang:
    """The next allocation of the KV cache takes until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).kv_cache, "renew")])


def hang_in_commit(pool: EnginePool, engine_index: int, at: int = 1) -> Hang:
    """The next time that new weights are put in place takes until the event is set."""
    return _hang([(scheduler_of(pool, engine_index).leaves, "replace")], at)


def _hang(places: list[tuple[Any, str]], at: int = 1) -> Hang:
    let_go = Hang()

    def wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
        let_go.begun.set()
        let_go.wait()
        return original(*args, **kwargs)

    once(places, at, wrong)
    return let_go


def raise_in_reset(pool: EnginePool, engine_index: int) -> None:
    """The next allocation of the KV cache fails."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"device {engine_index} gives no memory")

    once([(scheduler_of(pool, engine_index).kv_cache, "renew")], 1, wrong)


def raise_in_commit(pool: EnginePool, engine_index: int, at: int = 1, times: int = 1) -> None:
    """Time number `at` from now that weights are put in place fails."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"device {engine_index} does not take weights")

    once([(scheduler_of(pool, engine_index).leaves, "replace")], at, wrong, times)


def fail_once(owner: Any, method: str) -> None:
    """The next call of this method raises."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"{method} fails")

    once([(owner, method)], 1, wrong)


def raise_in_decode(pool: EnginePool) -> None:
    """The tokenizer fails at the next output."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault("the tokenizer is broken")

    once([(pool.engines[0].tokenizer_manager.tokenizer, "decode")], 1, wrong)


def raise_in_check(pool: EnginePool, engine_index: int, at: int = 1) -> None:
    """The engine cannot make text of the ids of a request with stop strings."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise Fault(f"the tokenizer of engine {engine_index} is broken")

    once([(scheduler_of(pool, engine_index).tokenizer, "decode")], at, wrong)


def placed_on(where: Any) -> set[int]:
    """The ids of the devices on which a `device_put` of one array or of many places it."""
    places = where if isinstance(where, list) else [where]
    return {device.id for place in places for device in getattr(place, "device_set", ())}


@contextmanager
def refusing_devices() -> Iterator[set[int]]:
    """If a device's id is added to the set, the next `device_put` onto it raises. If that placed
    many arrays, so does the next of a single array, because these are then tried one by one."""
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
    """If a device's id is added to the set, everything that is asked of it raises from then on,
    as if a GPU's context is lost or a TPU has halted. Only a new process could use it again."""
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
