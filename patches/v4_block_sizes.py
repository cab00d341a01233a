"""Attention has block sizes on a TPU v4.

What breaks: On a v4 the first forward raises `NotImplementedError: Unsupported tpu_version=4.`, so
an engine cannot even warm up.

Why: `get_default_block_sizes` of the ragged paged attention knows versions 5, 6 and 7. The kernel
itself compiles for a v4.

What we change: On a v4 the function answers as on a v5. A v5e has two thirds of the bandwidth, and
matrix units of the same size. The memory that a block may take is an argument, and stays the v4's.
This compiles and was never run: `make tpu-check` compiles decode and prefill for a v4 with these
sizes. Faster sizes may exist.

Remove when: Upstream's function has sizes for version 4.
"""

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3"
_V4, _V5 = 4, 5


def _is_needed(original) -> bool:
    """Ask upstream's function, as on a v4, for the sizes of a small model in bfloat16."""
    bfloat16 = module("ml_dtypes").bfloat16
    on_v4 = with_globals(original, get_tpu_version=lambda: _V4)
    try:
        on_v4(
            bfloat16,
            bfloat16,
            actual_num_q_heads=16,
            actual_num_kv_heads=8,
            head_dim=128,
            page_size=128,
            max_num_tokens=256,
            max_num_seqs=8,
            pages_per_seq=8,
        )
    except NotImplementedError:
        return True
    return False


def _replace(original):
    on_v5 = with_globals(original, get_tpu_version=lambda: _V5)

    def get_default_block_sizes(*args, **kwargs):
        # The module's own function gives the version of the TPU for which this is traced.
        on_v4 = original.__globals__["get_tpu_version"]() == _V4
        return (on_v5 if on_v4 else original)(*args, **kwargs)

    return get_default_block_sizes


PATCH = Patch(
    name="v4_block_sizes",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "get_default_block_sizes",
            _replace,
            (
                "q_dtype",
                "kv_dtype",
                "actual_num_q_heads",
                "actual_num_kv_heads",
                "head_dim",
                "page_size",
                "max_num_tokens",
                "max_num_seqs",
                "pages_per_seq",
                "case",
                "vmem_limit_bytes",
                "use_custom_mask",
                "sliding_window",
            ),
        ),
    ),
    probe=_is_needed,
)
