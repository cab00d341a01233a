"""Block sizes of attention for each TPU version, without a TPU. No kernel runs."""

import jax.numpy as jnp
import pytest

import patches
from patches import v4_block_sizes
from patches._lookup import module

KERNEL = module("sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3")
SHAPES = [
    # q heads, kv heads, page size, most tokens, pages a request
    (32, 8, 128, 64, 32),
    (32, 8, 128, 4096, 32),
    (16, 8, 16, 256, 256),
    (8, 4, 64, 1024, 8),
    (14, 2, 128, 512, 16),
]
V4_MEMORY = 16 * 2**20 // 2  # half of a v4 core's, the kernel's own limit


def sizes(monkeypatch, version, shape, **options):
    monkeypatch.setattr(KERNEL, "get_tpu_version", lambda: version)
    q_heads, kv_heads, page_size, tokens, pages = shape
    return KERNEL.get_default_block_sizes(
        jnp.bfloat16,
        jnp.bfloat16,
        q_heads,
        kv_heads,
        128,
        page_size,
        tokens,
        64,
        pages,
        vmem_limit_bytes=V4_MEMORY,
        **options,
    )


@pytest.fixture(params=[KERNEL.RpaCase.DECODE, KERNEL.RpaCase.MIXED], ids=["decode", "mixed"])
def kind(request):
    return request.param


def test_upstream_has_none_for_v4(monkeypatch):
    """Without the patch, a v4 is refused."""
    assert v4_block_sizes.PATCH.is_needed()
    with pytest.raises(NotImplementedError, match="tpu_version=4"):
        sizes(monkeypatch, 4, SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_v4_gets_whole_pages(monkeypatch, shape, kind):
    """With the patch the kernel accepts its sizes: whole pages, in equal steps."""
    patches.apply([v4_block_sizes.PATCH])
    got = sizes(monkeypatch, 4, shape, case=kind)
    assert got["bkv_sz"] % shape[2] == got["bkv_sz"] % got["bkv_csz"] == 0
    assert 1 <= got["bq_csz"] <= got["bq_sz"] <= max(1, shape[3])
    if kind is KERNEL.RpaCase.DECODE:
        assert got["bq_sz"] == 1


@pytest.mark.parametrize("version", [5, 6, 7])
def test_other_versions_keep_theirs(monkeypatch, version, kind):
    """The patch is for v4 alone."""
    before = [sizes(monkeypatch, version, shape, case=kind) for shape in SHAPES]
    patches.apply([v4_block_sizes.PATCH])
    assert [sizes(monkeypatch, version, shape, case=kind) for shape in SHAPES] == before


def test_an_unknown_version_is_still_refused(monkeypatch):
    """Without a TPU the kernel sees version -1, and no sizes are made up for it."""
    patches.apply([v4_block_sizes.PATCH])
    with pytest.raises(NotImplementedError, match="tpu_version=-1"):
        sizes(monkeypatch, -1, SHAPES[0])
