"""Programs that tests run as processes: `python -P host_script.py NAME MODEL OPTIONS`.

They print a line when a fault may come, and one of JSON at the end.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for tests and benchmarks

from tests.support.host_state_script import (  # first: it prepares JAX
    differences,
    snapshot,
    watch_atexit,
)

# isort: split
import contextlib
import json
import logging
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[65 + i, 90 - i, 40 + i] for i in range(12)]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("this state was not reached")
        time.sleep(0.01)


def say(word: str) -> None:
    print(f"{word}\n", end="", flush=True)  # in one write, because several threads print


def at_rest(pool: Any) -> bool:
    return all(load["running"] == load["kv_used_tokens"] == 0 for load in pool.get_load())


def host(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Faults with a reset and a rebuild. The state of the process is compared before and after."""
    from enginepool import EnginePool
    from tests.support import faults

    got: list[int] = []
    ours = (signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGINT)
    for number in ours:
        signal.signal(number, lambda number, _: got.append(number))
    watch_atexit()
    tempfile.tempdir = folder = tempfile.mkdtemp()  # other processes use the usual one
    child = subprocess.Popen(["sleep", "600"])
    pool = EnginePool(model, devices=2, max_restarts=1000, **options)
    pool.generate_all(input_ids=PROMPTS, sampling_params=SHORT)
    until(lambda: at_rest(pool))
    before = snapshot()

    def recovered() -> list[str]:
        return [e["by"] for e in pool.events() if e["event"] == "engine_recovered"]

    def break_twice() -> dict[str, Any]:
        for rebuild in (False, True):
            before = len(recovered())
            if rebuild:
                faults.raise_in_reset(pool, 1)
            faults.raise_in_step(pool, 1, 2)
            pool.generate_all(input_ids=PROMPTS, sampling_params=SHORT)
            until(lambda before=before: len(recovered()) > before)
        pool.generate_all(input_ids=PROMPTS, sampling_params=SHORT)
        until(lambda: at_rest(pool))
        return snapshot()

    first, second = break_twice(), break_twice()
    lives, kinds = child.poll() is None, recovered()
    pool.close()
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    child.kill()
    child.wait()
    shutil.rmtree(folder)
    return {
        "recovered": kinds,
        "differences": {**differences(before, second), **differences(first, second)},
        "signals": got,
        "child lives": lives,
    }


def interrupted(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Control-C in a call on the main thread. Then the pool is used, and closed."""
    from enginepool import EnginePool

    signal.signal(signal.SIGINT, signal.default_int_handler)
    pool = EnginePool(model, devices=2, **options).open()
    raised = ""
    try:
        with telling(pool):
            pool.generate_all(input_ids=PROMPTS, sampling_params=LONG)
    except KeyboardInterrupt as error:
        raised = type(error).__name__
    until(lambda: at_rest(pool))
    stats = pool.stats()
    result = pool.generate(input_ids=PROMPTS[0], sampling_params=SHORT)
    pool.close()
    return {
        "raised": raised,
        "aborted": stats["aborted"],
        "states": [engine["state"] for engine in stats["engines"]],
        "kv": [engine["kv_used_tokens"] for engine in stats["engines"]],
        "length": len(result["output_ids"]),
        "threads": [thread.name for thread in threading.enumerate()],
    }


def load(pool: Any) -> list[threading.Thread]:
    """More calls than the engines run at a time, in daemon threads, so that Python does not wait
    for them."""

    def call() -> None:
        try:
            pool.generate_all(input_ids=PROMPTS, sampling_params=LONG)
        except Exception as error:
            with contextlib.suppress(ValueError):  # standard output is gone
                say(type(error).__name__)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: pool.stats()["running"] == 8)
    return threads


def end_under_load(model: str, options: dict[str, Any]) -> None:
    """The script ends with the pool open and calls in flight."""
    from enginepool import EnginePool

    pool = EnginePool(model, devices=2, **options).open()
    load(pool)
    say("generating")


def end_while_stuck(model: str, options: dict[str, Any]) -> None:
    """The same with an engine in a step that does not return. Nothing compiles meanwhile."""
    from enginepool import EnginePool
    from tests.support import faults

    logging.getLogger("enginepool").setLevel(logging.CRITICAL)
    options |= {"warmup": "sequential", "step_timeout": 10.0}
    pool = EnginePool(model, devices=2, **options).open()
    load(pool)
    faults.hang_in_step(pool, 1)
    until(lambda: pool.stats()["engines"][1]["state"] == "abandoned")
    say("generating")


def interrupted_in_with(model: str, options: dict[str, Any]) -> None:
    """Control-C leaves the block and closes the pool. Calls of other threads get an error."""
    from enginepool import EnginePool

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = []
    try:
        with EnginePool(model, devices=2, **options) as pool:
            threads = load(pool)
            say("generating")
            threading.Event().wait()
    finally:
        for thread in threads:
            thread.join()
        left = [t.name for t in threading.enumerate() if t.name.startswith("enginepool")]
        say(f"left: {left}")


@contextlib.contextmanager
def telling(pool: Any) -> Any:
    """Print a word when both engines are full."""

    def tell() -> None:
        until(lambda: pool.stats()["running"] == 8)
        say("generating")

    thread = threading.Thread(target=tell)
    thread.start()
    yield
    thread.join()


PROGRAMS: dict[str, Callable[..., Any]] = {
    "host": host,
    "interrupted": interrupted,
    "end-under-load": end_under_load,
    "end-while-stuck": end_while_stuck,
    "interrupted-in-with": interrupted_in_with,
}

if __name__ == "__main__":
    name, model, options = sys.argv[1:]
    report = PROGRAMS[name](model, json.loads(options))
    if report is not None:
        say(json.dumps(report))
