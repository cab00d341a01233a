"""What a pool changes in the process while it opens, and with `tune_host=True` while it is open.
All of it is undone."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enginepool import EnginePool
from enginepool.process.tuning import tuned
from tests.support.pools import SMALL


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    before = sys.getswitchinterval()
    gc.unfreeze()
    yield
    sys.setswitchinterval(before)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    """As in a host that has not asked for it."""
    gc.unfreeze()


def state() -> tuple[float, bool]:
    return sys.getswitchinterval(), frozen()


def frozen() -> bool:
    """Python 3.12 has a few hundred frozen objects of its own."""
    return gc.get_freeze_count() > 1000


def test_pool(model_dir: Callable[[str], Path]) -> None:
    """Only while the pool is open, and only if the option is set."""
    found = state()
    path, options = str(model_dir("qwen3")), SMALL | {"devices": 1, "warmup": "none"}
    with EnginePool(path, **options):
        assert state() == found
    with EnginePool(path, tune_host=True, **options):
        assert sys.getswitchinterval() < found[0]
        assert frozen()
    assert state() == found


def test_opening(model_dir: Callable[[str], Path]) -> None:
    """Until all engines serve, garbage collections skip the host's objects."""
    found = state()
    seen = []
    pool = EnginePool(str(model_dir("qwen3")), devices=2, warmup="none", **SMALL)
    try:
        pool.open(on_engine=lambda _: seen.append(frozen()))
        assert seen == [True, True]
        assert state() == found
    finally:
        pool.close()


def test_opening_fails(model_dir: Callable[[str], Path]) -> None:
    """Nothing stays if opening fails half way."""
    found = state()
    path = str(model_dir("qwen3"))

    def stop(engine: object) -> None:
        raise RuntimeError("the host's own")

    with pytest.raises(RuntimeError, match="the host's own"):
        EnginePool(path, devices=2, warmup="none", **SMALL).open(on_engine=stop)
    assert state() == found


def test_overlap() -> None:
    """The last of several pools restores what the first found."""
    found = state()
    first, second = tuned(), tuned()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert state() != found
    second.__exit__(None, None, None)
    assert state() == found


def test_the_hosts_own_choices() -> None:
    """A shorter interval stays, objects that the host froze stay frozen, and so do changes that
    the host makes meanwhile."""
    sys.setswitchinterval(0.0001)
    gc.freeze()
    with tuned():
        assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.05)
    assert frozen()
    sys.setswitchinterval(0.005)
    with tuned():
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002, rel=0.05)
