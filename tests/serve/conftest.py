from collections.abc import Iterator

import pytest

from enginepool import EnginePool, toy
from tests.support.pools import MakePool
from tests.support.servers import Running, serving


@pytest.fixture(scope="session")
def sums(keep_pool: MakePool) -> EnginePool:
    """Four engines on the toy that adds, with room for 1,000 waiting requests."""
    return keep_pool("toy", 4, max_queued=1000, when_full="raise")


@pytest.fixture(scope="session")
def one_sum(keep_pool: MakePool) -> EnginePool:
    """One engine, with room for two waiting requests. Its streams come two tokens at a time."""
    return keep_pool("toy", 1, max_queued=2, when_full="raise", stream_interval=2)


@pytest.fixture(scope="module")
def plain(sums: EnginePool) -> Iterator[Running]:
    """A server without administration."""
    with serving(sums) as running:
        yield running


@pytest.fixture
def administered(sums: EnginePool) -> Iterator[Running]:
    """A server with a port for each engine, which reloads from the toy's directory. The pool
    gets its weights back."""
    updates = sums.runtime.desired.update
    with serving(
        sums, engine_ports=(0, 0, 0, 0), enable_admin=True, model_root=toy.checkpoint().parent
    ) as running:
        yield running
    sums.continue_generation()
    sums.resume_memory_occupation()
    if sums.runtime.desired.update != updates:
        sums.update_weights(toy.checkpoint(), weight_version=0)
