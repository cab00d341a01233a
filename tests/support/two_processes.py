"""One process of a JAX program of two. Each has two virtual CPU devices and its own pool.

Run by tests/process/test_many_processes.py. Prints one line of JSON. The two processes take turns
at everything that a pool does, so a collective in it would wait for the other process for ever.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginepool import EnginePool, InvalidConfig, InvalidWeights
from tests.support.faults import raise_in_reset, raise_in_step
from tests.support.layouts import GREEDY, leaves, tensors
from tests.support.liveness import until
from tests.support.pools import SMALL

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [90, 91]]
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.scale"
WHOLE, WITHIN, ACROSS = PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(("hosts", "fsdp"))


class Turns:
    """The first process runs a step while the other waits, then the other way round. They meet
    by files, which need no collective."""

    def __init__(self, process: int, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        for process in range(2):
            done = self._folder / f"{name} {process}"
            if process == self._process:
                yield
                done.touch()
            until(done.exists)


def over_all(params: dict[str, np.ndarray], spec: PartitionSpec) -> dict[str, jax.Array]:
    """A trainer's global arrays on all devices of both processes. Vectors are replicated."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("hosts", "fsdp"))

    def put(value: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, spec if value.ndim > 1 else WHOLE)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {name: put(np.array(value)) for name, value in params.items()}


def refused(error: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


def main(process: int, port: int, folder: Path, old: Path, new: Path) -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    turn = Turns(process, folder)
    found: dict[str, Any] = {"devices": [device.id for device in jax.local_devices()]}
    theirs = [device for device in jax.devices() if device not in jax.local_devices()]
    with turn("refuse"):
        pool = EnginePool(str(old), devices=theirs, **SMALL)
        found["elsewhere"] = refused(InvalidConfig, pool.open)
    with turn("open"):
        pool = EnginePool(str(old), **SMALL).open()
    prompts = PROMPTS[process:]  # not as many as in the other process

    def serve(name: str) -> None:
        results = pool.generate_all(None, GREEDY, input_ids=prompts, return_logprob=True)
        found[name] = {"prompts": prompts, "results": results}

    def update(name: str, tree: dict[str, jax.Array]) -> None:
        with turn(name):
            report = pool.update_weights(tree)
            found[f"{name} shared"] = [engine.shared for engine in report.engines]
            found[f"{name} checksum"] = pool.checksum()
            serve(name)

    with turn("serve"):
        serve("old")
    with turn("rebuild"):
        raise_in_reset(pool, 0)
        raise_in_step(pool, 0)
        serve("failed")
        until(lambda: any(event["event"] == "engine_recovered" for event in pool.events()))
        found["recovered by"] = [event.get("by") for event in pool.events()][-1]
        serve("rebuilt")
    # The other process's engines have not changed.
    update("replicated", over_all(leaves(new), WHOLE))
    names = tensors(old)
    update("names", over_all({**names, "lm_head.weight": names[EMBEDDING]}, WHOLE))
    update("within", over_all(leaves(new), WITHIN))
    parts = over_all(leaves(old), ACROSS)
    elsewhere = NamedSharding(Mesh(np.array(theirs), ("all",)), WHOLE)
    norm = leaves(new)[NORM]
    there = jax.make_array_from_callback(norm.shape, elsewhere, lambda _: norm, dtype=norm.dtype)
    with turn("across"):
        found["across"] = refused(InvalidWeights, lambda: pool.update_weights(parts))
        tree = {**leaves(old), NORM: there}
        found["there"] = refused(InvalidWeights, lambda: pool.update_weights(tree))
        found["across checksum"] = pool.checksum()
        serve("untouched")
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), WHOLE)
    update("gathered", jax.jit(lambda tree: tree, out_shardings=everywhere)(parts))
    with turn("close"):
        pool.close()
    found["processes"] = [jax.process_count(), jax.process_index()]
    return found


if __name__ == "__main__":
    number, port, *paths = sys.argv[1:]
    try:
        print(json.dumps(main(int(number), int(port), *map(Path, paths))), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for the other process, which waits for this one
