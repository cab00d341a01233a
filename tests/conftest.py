"""Four virtual CPU devices for every test, pinned here and nowhere else, before JAX starts."""

import fcntl
import gc
import os
import signal
import tempfile
import time

from tests.support.xla import virtual_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = virtual_devices(4)
os.environ["HF_HUB_OFFLINE"] = "1"
# A script's background jobs ignore Control-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib
import pytest

from enginepool import EnginePool, toy
from enginepool.engine.common_programs import CommonPrograms
from enginepool.engine.executable_cache import ExecutableCache
from tests.support.forced import write_scripted_model
from tests.support.pools import SMALL, MakePool, open_with
from tests.support.reference import LARGER, make_random_model


class Kept(dict[bytes, bytes]):
    """Executables by program, each of them also in a file. While a process compiles one, the others
    of this run wait for its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiling: dict[bytes, Any] = {}  # by program, a file that this process has locked

    def get(self, key: bytes, default: Any = None) -> Any:
        if key not in self:
            if key not in self._compiling and not (self._folder / key.hex()).exists():
                self._lock(key)
            if (file := self._folder / key.hex()).exists():
                super().__setitem__(key, file.read_bytes())
                self._unlock(key)
        return super().get(key, default)

    def __setitem__(self, key: bytes, executable: bytes) -> None:
        super().__setitem__(key, executable)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as part:
            part.write(executable)
        Path(part.name).rename(self._folder / key.hex())
        self._unlock(key)

    def _lock(self, key: bytes) -> None:
        """Wait for the process that compiles it, for a minute at most: it may have failed."""
        lock = (self._folder / f"{key.hex()}.lock").open("w")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        self._compiling[key] = lock

    def _unlock(self, key: bytes) -> None:
        if lock := self._compiling.pop(key, None):
            Path(lock.name).unlink(missing_ok=True)
            lock.close()


class Latest(CommonPrograms):
    """Keeps the latest programs only. Whatever was compiled of a program for a device stays
    loaded as long as the program does, and Linux limits the memory maps of a process."""

    def common(self, likeness: Any, make: Callable[[], Any]) -> Any:
        made = super().common(likeness, make)
        with self._lock:
            self._known.sort(key=lambda each: each[1] is made)  # the one just used comes last
            del self._known[:-24]
        return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first. So no process of `make test` is alone with one at the end."""
    items.sort(key=lambda item: item.path.parent.name != "weights")


@pytest.fixture(scope="session", autouse=True)
def one_cache(request: pytest.FixtureRequest) -> Iterator[ExecutableCache]:
    """Each program is traced and compiled once, not once for each pool, because most pools here
    are alike. Executables are kept in .pytest_cache for the other processes of this run and for
    the next run."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"executables-{jaxlib.__version__}")
    cache = ExecutableCache(Kept(folder), Latest())
    with pytest.MonkeyPatch.context() as patch:
        open_with(patch, cache)
        yield cache


@pytest.fixture(scope="module", autouse=True)
def freeze_garbage_before_each_file() -> None:
    """Garbage collections skip the objects that existed before a file's tests. Tests that collect
    to measure memory spent a fifth of their time on those objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by name: "toy", "scripted" (see forced.py), or random weights of a
    family, or "larger qwen3"."""

    @cache
    def find(name: str) -> Path:
        if name == "toy":
            return toy.checkpoint()
        directory = tmp_path_factory.mktemp(name)
        if name == "scripted":
            return write_scripted_model(directory)
        return random_model(directory, name, seed=1)

    return find


def random_model(directory: Path, name: str, seed: int) -> Path:
    if name == "larger qwen3":
        return make_random_model(directory, "qwen3", seed, **LARGER)
    return make_random_model(directory, name, seed)


@contextmanager
def opened(model_dir: Callable[[str], Path]) -> Iterator[MakePool]:
    """`make(model, devices=4, **options)` gives open pools until the end of this fixture's scope.

    The same arguments give the same pool, so a test must leave it as it was.
    """
    pools: dict[str, EnginePool] = {}
    with ExitStack() as stack:

        def make(model: str = "qwen3", devices: int = 4, **options: Any) -> EnginePool:
            key = repr((model, devices, sorted(options.items())))
            if key not in pools:
                pool = EnginePool(str(model_dir(model)), devices=devices, **(SMALL | options))
                pools[key] = stack.enter_context(pool)
            return pools[key]

        yield make


@pytest.fixture(scope="session")
def keep_pool(model_dir: Callable[[str], Path]) -> Iterator[MakePool]:
    """Pools for many files, kept for the session."""
    with opened(model_dir) as make:
        yield make


@pytest.fixture(scope="module")
def make_pool(model_dir: Callable[[str], Path], keep_pool: MakePool) -> Iterator[MakePool]:
    """Pools for a file. Pools with options of their own are closed at the file's end: the
    programs of all of them would need more memory maps than Linux gives a process, which then
    crashes."""
    with opened(model_dir) as make:

        def find(model: str = "qwen3", devices: int = 4, **options: Any) -> EnginePool:
            return (make if options else keep_pool)(model, devices, **options)

        yield find


@pytest.fixture(scope="session")
def pool(keep_pool: MakePool) -> EnginePool:
    """Four engines on a Qwen3 of random weights."""
    return keep_pool("qwen3", 4)


@pytest.fixture(scope="session")
def scripted(keep_pool: MakePool) -> EnginePool:
    """Two engines on the model whose every answer is known."""
    return keep_pool("scripted", 2)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of the same shapes as `model_dir`'s, with other weights."""
    return cache(lambda name: random_model(tmp_path_factory.mktemp("new"), name, seed=2))


@pytest.fixture
def llama(keep_pool: MakePool, model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Two engines, which get their own weights back afterwards. Llama's head is not tied."""
    pool = keep_pool("llama", 2)
    yield pool
    pool.update_weights(model_dir("llama"), weight_version=0)


@pytest.fixture
def four(pool: EnginePool, model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """`pool`, which gets its own weights back afterwards."""
    yield pool
    pool.update_weights(model_dir("qwen3"), weight_version=0)


@pytest.fixture
def retracted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests upstream retracted from a running batch because the KV cache was full,
    each time."""
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch

    counts: list[int] = []
    retract = ScheduleBatch.retract_decode

    def counting(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = retract(batch, *args, **kwargs)
        counts.append(len(result[0]))
        return result

    monkeypatch.setattr(ScheduleBatch, "retract_decode", counting)
    return counts


@pytest.fixture
def control_c() -> Iterator[None]:
    """Python's own handler, even if the tests run in a shell's background, which ignores
    Control-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
