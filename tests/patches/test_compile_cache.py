"""JAX's persistent compilation cache around upstream's constructor."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import patches
from patches import compile_cache
from patches._lookup import module

SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
}

pytestmark = pytest.mark.skipif(
    "_setup_jit_cache" not in vars(module("sgl_jax.srt.managers.scheduler").Scheduler),
    reason="this upstream has no _setup_jit_cache and never switches the cache off",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A host that keeps its compiled programs in a folder, also by its environment."""
    found = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    for name, value in {**SETTINGS, "jax_compilation_cache_dir": str(tmp_path)}.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in found.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def configuration():
    return {name: getattr(jax.config, name) for name in SETTINGS}


def set_up(device_index):
    scheduler = module("sgl_jax.srt.managers.scheduler").Scheduler
    scheduler._setup_jit_cache(None, SimpleNamespace(device_indexes=[device_index]))


def compile_on(device_index, constant):
    """Compile a program that no other test has, for one device."""
    with jax.default_device(jax.devices()[device_index]):
        jax.block_until_ready(jax.jit(lambda x: x * constant + 1)(jnp.ones(3)))


@pytest.mark.parametrize("device_index", [0, 1])
def test_upstream_changes_the_configuration(cache, device_index):
    """Without the patch, an engine changes the process's cache settings."""
    before = configuration()
    set_up(device_index)
    assert configuration() != before


@pytest.mark.parametrize("device_index", [0, 1])
def test_the_configuration_stays(cache, device_index):
    """With the patch, the host's settings stay and its programs are still cached."""
    patches.apply([compile_cache.PATCH])
    before = configuration()
    set_up(device_index)
    assert configuration() == before
    compile_on(0, 1.5 + device_index)
    assert any(cache.iterdir())


def test_an_affected_platform_is_protected(cache, monkeypatch):
    """On it, programs for devices other than the first are not cached. Others are."""
    monkeypatch.setattr(compile_cache, "AFFECTED_PLATFORMS", {"cpu"})
    patches.apply([compile_cache.PATCH])
    compile_on(1, 3.25)
    assert not any(cache.iterdir())
    compile_on(0, 3.25)
    assert any(cache.iterdir())


def test_other_platforms_cache_for_every_device(cache):
    """Only TPUs crash, so other platforms cache every program."""
    patches.apply([compile_cache.PATCH])
    compile_on(1, 4.75)
    assert any(cache.iterdir())


def test_compiling_without_a_device_is_not_changed():
    """A backend that only compiles, for chips elsewhere, has no first device."""
    elsewhere = SimpleNamespace(platform="tpu", local_devices=list)
    chips = np.array([SimpleNamespace(id=3)])
    cache_key = compile_cache._replace_cache_key(lambda *_: "a key")
    assert cache_key(None, elsewhere, None, chips) == "a key"
