"""Engines share executables, beside the host's own persistent cache."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as hosts

from enginepool.engine import executable_cache
from enginepool.engine.executable_cache import ExecutableCache, compiling_ahead
from tests.support.liveness import SECONDS


@pytest.fixture
def hosts_cache(tmp_path: Path) -> Iterator[None]:
    """A persistent cache that JAX has begun to use and goes on using. Its configuration is put
    back before the test, like that of upstream's scheduler after it was built."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    hosts.reset_cache()
    for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
        jax.config.update(name, value)
    try:
        jax.jit(lambda x: 41 * x)(jnp.ones(3))
        assert list(tmp_path.iterdir())
        jax.config.update(names[0], before[names[0]])
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        hosts.reset_cache()


def test_a_program_is_compiled_once() -> None:
    cache = ExecutableCache()
    numbers = [jax.device_put(3.0, device) for device in jax.devices()]
    with cache.sharing():
        products = [jax.jit(lambda x: 19 * x)(number) for number in numbers]
    assert [float(product) for product in products] == [57] * len(numbers)
    assert (cache.compiled, cache.reused) == (1, len(numbers) - 1)


def test_the_hosts_cache_gets_nothing_that_cannot_run(hosts_cache: None) -> None:
    """Any reader of that cache, such as the host's next process, can run what it finds."""

    def answers() -> list[float]:
        numbers = [jax.device_put(jnp.arange(64.0), device) for device in jax.devices()[:2]]
        return [float(jax.jit(lambda x: jnp.tanh(x / 9).sum() + x[7])(x)) for x in numbers]

    expected = float(jnp.tanh(jnp.arange(64.0) / 9).sum() + 7)
    with ExecutableCache().sharing():
        assert answers() == pytest.approx([expected] * 2)
    assert answers() == pytest.approx([expected] * 2)


def test_another_thread_compiles_ahead() -> None:
    """It compiles while this thread has the slot for Python and takes long, and it ends before
    this thread goes on. Afterwards the program is compiled."""
    cache = ExecutableCache()
    x = jax.device_put(np.float32(2), jax.devices()[0])
    ahead, threads = jax.jit(lambda x: 23 * x), []

    def compile_ahead() -> None:
        threads.append(threading.current_thread())
        ahead.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)).compile()

    with cache.sharing(), cache.limiter.held():
        with compiling_ahead([compile_ahead]):
            assert float(jax.jit(lambda x: 29 * x)(x)) == 58
        assert (cache.compiled, cache.reused) == (2, 0)
        assert float(ahead(x)) == 46
    assert (cache.compiled, cache.reused) == (2, 0)
    assert threads != [threading.current_thread()]
    assert not threads[0].is_alive()


def test_several_threads_compile_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with enough cores XLA compiles two programs at once. Each waits for the other
    here."""
    monkeypatch.setattr(executable_cache, "usable_cores", lambda: 3)
    both = threading.Barrier(2, timeout=SECONDS)

    class Waiting(ExecutableCache):
        def load_or_compile(self, *args: Any) -> Any:
            both.wait()
            return super().load_or_compile(*args)

    x = jax.ShapeDtypeStruct((), np.float32)
    programs = [jax.jit(lambda x: 31 * x), jax.jit(lambda x: 37 * x)]
    cache = Waiting()
    jobs = [lambda one=one: one.lower(x).compile() for one in programs]
    with cache.sharing(), cache.limiter.held(), compiling_ahead(jobs):
        pass
    assert cache.compiled == 2


def test_what_fails_ahead_is_raised() -> None:
    def compile_ahead() -> None:
        raise ValueError("a program that cannot be")

    done = []
    with (
        ExecutableCache().sharing(),
        pytest.raises(ValueError, match="cannot be"),
        compiling_ahead([compile_ahead]),
    ):
        done.append("what is in the block")
    assert done
    with ExecutableCache().sharing(), pytest.raises(KeyError), compiling_ahead([compile_ahead]):
        raise KeyError("of the block itself")
