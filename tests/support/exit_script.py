"""Programs that end with an open pool: `python -P exit_script.py NAME MODEL OPTIONS`."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
# After the flags of the test, because the last count of devices holds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["HF_HUB_OFFLINE"] = "1"

import asyncio
import json
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

from enginepool import EnginePool

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}

kept: Any = None


def make() -> EnginePool:
    pool = EnginePool(sys.argv[2], devices=2, **json.loads(sys.argv[3]))
    pool.generate(input_ids=[65, 66], sampling_params=SHORT)  # opens it
    return pool


def in_module() -> None:
    global kept
    kept = make()


def in_cycle() -> None:
    """Nothing finds it before Python takes everything down."""
    import gc

    gc.disable()
    holder: dict[str, Any] = {"pool": make()}
    holder["self"] = holder


def in_traceback() -> None:
    """An error is kept, and a frame of its traceback has the pool."""
    global kept
    pool = make()
    try:
        pool.generate("")
    except ValueError as error:
        kept = error


def in_function() -> None:
    """The pool is dropped, and closes itself, before Python ends."""
    make()


def in_daemons() -> None:
    """Calls are running in daemon threads."""
    global kept
    kept = pool = make()
    runs = [threading.Event() for _ in range(2)]

    def stream() -> None:
        for _ in pool.stream(input_ids=[[65] * 8] * 4, sampling_params=LONG):
            runs[0].set()

    def generate() -> None:
        runs[1].set()
        pool.generate_all(input_ids=[[65] * 8] * 8, sampling_params=LONG)

    for target in (stream, generate):
        threading.Thread(target=target, daemon=True).start()
    for one in runs:
        one.wait()


def forked() -> None:
    """What a child process sees that was forked while the pool is open and a call is in flight."""
    warnings.filterwarnings("ignore", message=".*fork")
    pool = make()
    chunks = pool.stream(input_ids=[[65] * 8] * 4, sampling_params=LONG)
    next(chunks)
    engine = pool.engines[0]
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: pool.generate("a"),
        "generate_all": lambda: pool.generate_all(["a"]),
        "stream": lambda: pool.stream("a"),
        "as_completed": lambda: pool.as_completed(["a"]),
        "chat": lambda: pool.chat([{"role": "user", "content": "a"}]),
        "async_generate": lambda: asyncio.run(pool.async_generate("a")),
        "update_weights": lambda: pool.update_weights({}),
        "checksum": pool.checksum,
        "release_weights": pool.release_weights,
        "pause_generation": pool.pause_generation,
        "continue_generation": pool.continue_generation,
        "abort_request": lambda: pool.abort_request(abort_all=True),
        "stats": pool.stats,
        "get_load": pool.get_load,
        "events": pool.events,
        "open": pool.open,
        "engines": lambda: pool.engines,
        "next": lambda: next(chunks),
        "engine.generate": lambda: engine.generate("a"),
        "engine.flush_cache": engine.flush_cache,
        "close": pool.close,
        "aclose": lambda: asyncio.run(pool.aclose()),
        "repr": lambda: repr(pool),
    }

    def child(answers: Any) -> None:
        signal.alarm(60)
        found = {}
        for name, call in calls.items():
            try:
                found[name] = str(call())
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        answers.send([os.getpid(), found])

    reports = []
    for start in ("fork", "multiprocessing"):
        reader, writer = multiprocessing.Pipe()
        if start == "fork":
            pid = os.fork()
            if not pid:
                child(writer)
                os._exit(0)  # JAX crashes in a forked child that ends in another way
            reports.append([*reader.recv(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        else:
            process: Any = multiprocessing.get_context("fork").Process(target=child, args=(writer,))
            process.start()
            answer = reader.recv()
            process.join()
            reports.append([*answer, process.exitcode])
    outputs = [chunk for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    again = pool.generate(input_ids=[65, 66], sampling_params=SHORT)
    pool.close()
    lengths = [len(output["output_ids"]) for output in [*outputs, again]]
    print(json.dumps({"pid": os.getpid(), "children": reports, "lengths": lengths}))


PROGRAMS: dict[str, Callable[[], None]] = {
    "module": in_module,
    "cycle": in_cycle,
    "traceback": in_traceback,
    "function": in_function,
    "daemons": in_daemons,
    "forked": forked,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
