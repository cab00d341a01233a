"""Programs that tests run as processes: `python -P host_state_script.py NAME MODEL OPTIONS`.

They print one line, of JSON or a word. If they print anything else, a test fails.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
# After the flags of the test, because the last count of devices holds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={4 if sys.argv[1:2] == ['idle'] else 2}"
)
os.environ["HF_HUB_OFFLINE"] = "1"
# Upstream sets these whenever a ServerArgs is made, also in earlier tests.
os.environ.pop("SGLANG_ENABLE_DETERMINISTIC_SAMPLING", None)

import asyncio
import atexit
import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing.resource_tracker
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def leave(ending: str, model: str, options: dict[str, Any]) -> None:
    """Leave a pool open, with a call in flight in another thread."""
    from enginepool import EnginePool

    pool = EnginePool(model, devices=1, **options)
    state = pool.stats()["engines"][0]["state"]
    if ending != "end":
        runs = threading.Event()

        def call() -> None:
            for _ in pool.stream(input_ids=[[65] * 8] * 8, sampling_params=LONG):
                runs.set()

        threading.Thread(target=call, daemon=True).start()
        runs.wait()
    print(state, flush=True)
    if ending == "exception":
        raise ValueError("the script's own")
    if ending == "exit":
        sys.exit(3)


# The state of the host process


def native_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        names.append((task / "comm").read_text().strip())
    return sorted(names)


def open_files() -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{entry}").split("[")[0])
    return sorted(links)


def snapshot() -> dict[str, Any]:
    """The parts of a process that a library could change. Each can be compared with `==`."""
    import jax
    import numpy as np
    import psutil

    gc.collect()
    root = logging.getLogger()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": native_threads(),
        "children": sorted(child.pid for child in psutil.Process().children(recursive=True)),
        "signal handlers": {
            int(n): repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())
        },
        "event loop policy": repr(asyncio.get_event_loop_policy()),
        "random": hash(random.getstate()),
        "numpy random": repr(np.random.get_state()),
        "root logger": [root.level, *map(repr, root.handlers), *map(repr, root.filters)],
        "logging switched off": logging.root.manager.disable,
        "jax config": {name: repr(value) for name, value in sorted(jax.config.values.items())},
        "environment": dict(os.environ),
        "temp files": sorted(os.listdir(tempfile.gettempdir())),
        "open files": open_files(),
        "atexit": sorted(exit_callbacks),
        "threading exit": [
            repr(threading._register_atexit),  # type: ignore[attr-defined]
            len(threading._threading_atexits),  # type: ignore[attr-defined]
        ],
        "resource tracker": multiprocessing.resource_tracker._resource_tracker._fd,  # type: ignore
        "device memory": sum(array.nbytes for array in jax.live_arrays()),
        "switch interval": sys.getswitchinterval(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "working directory": os.getcwd(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [before[name], after[name]]
        for name in before
        if repr(before[name]) != repr(after[name])
    }


# The modules that have registered exit callbacks and not removed them. (`atexit._ncallbacks()` also
# counts those that were removed.)
exit_callbacks: list[str] = []


def watch_atexit() -> None:
    register, unregister = atexit.register, atexit.unregister

    def module(function: Any) -> str:
        return str(getattr(function, "__module__", None) or type(function).__module__)

    def registered(function: Any, *args: Any, **kwargs: Any) -> Any:
        exit_callbacks.append(module(function))
        return register(function, *args, **kwargs)

    def unregistered(function: Any) -> None:
        if module(function) in exit_callbacks:
            exit_callbacks.remove(module(function))
        unregister(function)

    atexit.register, atexit.unregister = registered, unregistered


def prepare_host() -> subprocess.Popen[bytes]:
    """A process that has its own state: JAX in use on all devices, handlers, a child."""
    import jax
    import numpy as np

    watch_atexit()
    for device in jax.devices():
        with jax.default_device(device):
            jax.jit(lambda x: x @ x)(np.ones((256, 256), np.float32)).block_until_ready()
    tempfile.tempdir = tempfile.mkdtemp()
    random.seed(1)
    np.random.seed(1)
    logging.basicConfig(level=logging.INFO, filename=os.devnull)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def use(pool: Any) -> None:
    """Use each feature of a pool once."""
    pool.generate_all(["12+7=", "30+4="], SHORT, return_logprob=True, top_logprobs_num=2)
    pool.generate(["12+7="] * 9, {**SHORT, "temperature": 1.0, "n": 2})
    pool.generate("12+7=", {"regex": "[0-9]{1,3}"})
    pool.chat([{"role": "user", "content": "12+7="}], SHORT)
    list(pool.stream("12+7=", SHORT))
    list(pool.as_completed(["12+7=", "30+4="], SHORT))
    pool.pause_generation()
    pool.continue_generation()
    pool.flush_cache()
    pool.get_load()
    for engine in pool.engines:
        engine.generate("12+7=", sampling_params=SHORT)
    asyncio.run(pool.async_generate("12+7=", SHORT))
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda p: pool.generate(p, SHORT), ["12+7=", "30+4="]))


def pool_lives(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two lives of a pool. Reports what has changed."""
    child = prepare_host()
    before = snapshot()
    import enginepool

    report: dict[str, Any] = {"import": differences(before, snapshot())}
    report["imported"] = sorted(name for name in sys.modules if name.startswith("sgl_jax"))
    # structlog imports rich, which draws one number from `random` when it is imported.
    random.seed(1)
    pool = enginepool.EnginePool(model, devices=2, **options)
    report["constructor"] = differences(before, snapshot())
    with pool:
        use(pool)
        report["open"] = differences(before, snapshot())
    report["closed"] = differences(before, snapshot())
    before = snapshot()
    with enginepool.EnginePool(model, devices=2, **options) as pool:
        use(pool)
    report["second life"] = differences(before, snapshot())
    report["child lives"] = child.poll() is None
    child.communicate(b"\n")
    return report


def upstream(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same report for upstream's own Engine, started as its users do."""
    child = prepare_host()
    before = snapshot()
    random.seed(1)
    from sgl_jax.srt.entrypoints.engine import Engine

    options = {name: value for name, value in options.items() if name != "warmup"}
    engine = Engine(
        model_path=model,
        enable_single_process=True,
        device="cpu",
        device_indexes=[0],
        attention_backend="native",
        disable_overlap_schedule=True,
        disable_precompile=True,
        **options,
    )
    report = {"open": differences(before, snapshot())}
    engine.shutdown()
    time.sleep(0.5)
    report["closed"] = differences(before, snapshot())
    report["child lives"] = child.poll() is None
    print(json.dumps(report), flush=True)
    os._exit(0)  # its threads never end


def compile_once() -> None:
    """Later pools load what the first one compiled, which takes a tenth of the time. Each has
    its own copies, so it leaves as much behind as one that compiled them itself."""
    from enginepool import EnginePool
    from enginepool.engine.executable_cache import ExecutableCache
    from enginepool.runtime.runtime import Runtime

    first: dict[bytes, bytes] = {}

    def make_runtime(config: Any, name: str) -> Runtime:
        copies = {key: bytes(bytearray(code)) for key, code in first.items()}
        return Runtime(config, name, ExecutableCache(copies or first))

    EnginePool.make_runtime = staticmethod(make_runtime)


def cards(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Ten pools one after the other, as in a notebook, and what is left after each."""
    import jax
    import psutil

    from enginepool import EnginePool

    compile_once()
    left = []
    for _ in range(10):
        EnginePool(model, devices=2, **options).generate_all(["12+7=", "30+4="], SHORT)
        gc.collect()
        # Memory that malloc keeps in the arenas of ended threads is no leak.
        ctypes.CDLL(None).malloc_trim(0)
        left.append(
            {
                "arrays": sum(array.nbytes for array in jax.live_arrays()),
                "rss": psutil.Process().memory_info().rss,
                "threads": threading.active_count(),
                "native threads": len(native_threads()),
                "open files": len(open_files()),
            }
        )
    return {"left": left}


def idle(model: str, options: dict[str, Any]) -> dict[str, float]:
    """The share of a core that the process takes while its engines are idle, and while they are
    paused with running and waiting requests."""
    from enginepool import EnginePool

    shares = {}
    with EnginePool(model, devices=4, **options) as pool:
        pool.generate_all(["12+7="] * 16, SHORT)
        shares["at rest"] = idle_share()
        for mode in ("in_place", "retract"):
            stream = pool.stream(input_ids=[[65, 66 + i] for i in range(20)], sampling_params=LONG)
            next(stream)
            pool.pause_generation(mode)
            shares[mode] = idle_share()
            shares[f"{mode}, running"] = pool.stats()["running"]
            pool.continue_generation()
            stream.close()
    return shares


def idle_share() -> float:
    """CPU time of the whole process over wall time: the median of three windows after a pause."""
    time.sleep(2.0)
    shares = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        shares.append((time.process_time() - cpu) / (time.perf_counter() - wall))
    return statistics.median(shares)


def start(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """What importing enginepool and making a pool starts, in a process without JAX."""
    hooks = [asyncio.get_event_loop_policy(), threading._register_atexit]  # type: ignore
    import jax
    from jax._src import xla_bridge

    native = len(native_threads())
    from enginepool import EnginePool

    report: dict[str, Any] = {
        "imported engine": "sgl_jax.srt.entrypoints.engine" in sys.modules,
        "import threads": len(native_threads()) - native,
    }
    pool = EnginePool(model, devices=3, **options)
    return {
        **report,
        "constructor threads": len(native_threads()) - native,
        "python threads": threading.active_count(),
        "jax started": xla_bridge.backends_are_initialized(),
        "hooks": hooks == [asyncio.get_event_loop_policy(), threading._register_atexit],  # type: ignore
        "signals": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "repr": repr(pool),
        "devices": jax.config.jax_num_cpu_devices,
    }


PROGRAMS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "pool": pool_lives,
    "upstream": upstream,
    "cards": cards,
    "idle": idle,
    "start": start,
}

if __name__ == "__main__":
    name, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if name.startswith("leave-by-"):
        leave(name.removeprefix("leave-by-"), model, options)
    else:
        print(json.dumps(PROGRAMS[name](model, options)))
