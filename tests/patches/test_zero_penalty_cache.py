"""The zero-penalty cache, with upstream's defect of January 2026 put back."""

import types

import pytest

import patches
from patches import zero_penalty_cache
from patches._lookup import module
from tests.support.upstream import Upstream

GREEDY = {"temperature": 0.0, "max_new_tokens": 4}


def _keyed_by_shape(shape, sharding):
    """Upstream's former function, run in upstream's namespace: one array per shape, on whatever
    device."""
    if shape not in _zero_linear_penalty_cache:  # noqa: F821
        zeros = np.zeros(shape, dtype=np.float32)  # noqa: F821
        _zero_linear_penalty_cache[shape] = device_array(zeros, sharding=sharding)  # noqa: F821
    return _zero_linear_penalty_cache[shape]  # noqa: F821


@pytest.fixture
def keyed_by_shape(monkeypatch):
    """Put the defect back."""
    sampling = module("sgl_jax.srt.sampling.sampling_batch_info")
    defect = types.FunctionType(_keyed_by_shape.__code__, vars(sampling))
    monkeypatch.setattr(sampling, "_zero_linear_penalty_cache", {})
    monkeypatch.setattr(sampling, "_get_or_create_zero_penalty_device", defect)


def test_the_installed_upstream_is_right():
    """Both supported versions have the fix, so nothing is patched."""
    assert not zero_penalty_cache.PATCH.is_needed()
    assert patches.apply([zero_penalty_cache.PATCH]) == []


def test_two_engines_on_two_devices(keyed_by_shape, checkpoint):
    """With the defect two real engines fail. With the patch they give the same ids."""
    assert patches.apply([zero_penalty_cache.PATCH]) == [zero_penalty_cache.PATCH]
    engines = [Upstream(checkpoint, device_index=index) for index in range(2)]
    first, second = (engine.run([[2, 3, 4]], GREEDY) for engine in engines)
    assert first == second

    patches.revert()
    assert engines[0].run([[2, 3, 4]], GREEDY) == first
    with pytest.raises(ValueError, match="incompatible devices"):
        engines[1].run([[2, 3, 4]], GREEDY)
