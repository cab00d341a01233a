"""Real upstream schedulers on CPU, driven in this process; no patch survives a test."""

import os

from tests.support.xla import virtual_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", virtual_devices(4))

import pytest

import patches
from patches import min_p, request_seed, seeded_sampler, top_p_order
from tests.support.upstream import Upstream, write_checkpoint


@pytest.fixture(autouse=True)
def no_patches_left(monkeypatch):
    """Every test starts and ends with upstream as it was installed. `apply()` leaves no patch out,
    whatever the environment says.

    Pools that other tests keep open for the session get their patches back.
    """
    monkeypatch.delenv("ENGINEPOOL_OPTIMISATIONS", raising=False)
    applied = [patch for patch in patches.ALL if patches.is_applied(patch)]
    patches.revert()
    yield
    patches.revert()
    patches.apply(applied)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Qwen3 checkpoint of random weights, small enough for a step of milliseconds."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def upstream(checkpoint):
    """One real scheduler on the first CPU device.

    Its programs are compiled with the sampler's patches and keep them. Patches that a test applies
    or reverts later only change the host's code.
    """
    sampling = [top_p_order.PATCH, min_p.PATCH, seeded_sampler.PATCH, request_seed.PATCH]
    applied = patches.apply(sampling)
    scheduler = Upstream(checkpoint)
    scheduler.run([[2, 3]], {"temperature": 1.0, "max_new_tokens": 2, "sampling_seed": 1})
    scheduler.run([[2, 3]], {"temperature": 1.0, "max_new_tokens": 2})
    patches.revert(applied)
    return scheduler
