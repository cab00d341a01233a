"""Attention uses the rotary scaling of the configuration.

What breaks: Qwen3 and Qwen3-MoE ignore `rope_scaling`, and so does Qwen2 on sglang-jax 0.0.3rc99.
YaRN, by which their model cards extend the context, does nothing. Other families ignore YaRN's
`attention_factor`, and use `mscale` even without `mscale_all_dim`.

Why: These attentions get the scaling and make a plain `RotaryEmbedding`. `get_rope` knows the
scaling, but not `attention_factor`, which YaRN's configuration got later.

What we change: An attention is constructed without scaling. Its embedding is then made by
upstream's `get_rope`, with the same sizes and base. `attention_factor` is the configuration's.
`mscale` counts only together with `mscale_all_dim`, as Hugging Face defines it.

Remove when: All four attentions make their embedding with `get_rope`, and it takes
`attention_factor`.
"""

import functools
import inspect
from types import SimpleNamespace

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_ROTARY = "sgl_jax.srt.layers.embeddings"
_MODELS = "sgl_jax.srt.models."
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _is_needed(*constructors) -> bool:
    return _ignores_the_factor() or any(map(_drops_the_scaling, constructors))


def _ignores_the_factor() -> bool:
    """Ask upstream's function, without its cache. It is NumPy until the forward."""
    get_rope = with_globals(module(_ROTARY).get_rope, _ROPE_DICT={})
    scaling = _YARN | {"attention_factor": 0.5}
    return get_rope(8, 8, 64, 10000, rope_scaling=scaling)._rope_mscale != 0.5


def _drops_the_scaling(constructor) -> bool:
    """Construct an attention of stand-ins. Does one of them get the scaling?"""
    seen = []

    def stand_in(*args, **kwargs):
        seen.extend(kwargs.values())
        return SimpleNamespace()

    names = constructor.__globals__
    parts = {
        name: stand_in
        for name in constructor.__code__.co_names
        if callable(names.get(name)) and name not in ("DtypeConfig", "super")
    }
    parts["DtypeConfig"] = lambda *args, **kwargs: SimpleNamespace(
        get_dtype=lambda name: None, get_optional_dtype=lambda name: None
    )
    sizes = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "max_position_embeddings": 64}
    build = with_globals(constructor, **parts)
    build(SimpleNamespace(), **sizes, mesh=None, head_dim=8, rope_scaling=_YARN)
    return not any(value is _YARN for value in seen)


def _replace(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs)
        scaling = given.arguments.pop("rope_scaling", None)
        original(*given.args, **given.kwargs)
        if scaling:
            self.rotary_emb = _scaled(self.rotary_emb, scaling)

    return __init__


def _scaled(plain, scaling):
    """The embedding of the same sizes with this scaling."""
    given = {name: value for name, value in scaling.items() if value is not None}
    if not ("mscale" in given and "mscale_all_dim" in given):
        given = {k: v for k, v in given.items() if k not in ("mscale", "mscale_all_dim")}
    # Without upstream's cache: it may have embeddings from before the patches, and must not keep
    # this one after a revert.
    embedding = with_globals(module(_ROTARY).get_rope, _ROPE_DICT={})(
        head_size=plain.head_size,
        rotary_dim=plain.rotary_dim,
        max_position=plain.max_position_embeddings,
        base=plain.base,
        is_neox_style=plain.is_neox_style,
        rope_scaling=given,
        dtype=plain.dtype,
    )
    if "attention_factor" in given and hasattr(embedding, "_rope_mscale"):
        embedding._rope_mscale = float(given["attention_factor"])
    return embedding


PATCH = Patch(
    name="rotary_scaling",
    issue="not reported",
    replaced=tuple(
        Target(f"{_MODELS}{family}", f"{name}.__init__", _replace)
        for family, name in (
            ("llama", "LlamaAttention"),
            ("qwen2", "Qwen2Attention"),
            ("qwen3", "QWen3Attention"),
            ("qwen3_moe", "QWen3MoeAttention"),
        )
    ),
    probe=_is_needed,
)
