"""A checkpoint's rotary embeddings follow its configuration, or it does not open.

What transformers computes for each case is recorded in rotary.json (scripts/record_goldens.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import patches
from enginepool import EnginePool, InvalidConfig
from enginepool.engine.rotary_check import check_rotary
from enginepool.model_config.rotary import rotation
from patches import rotary_precision
from patches._lookup import module
from tests.support.checkpoints import make
from tests.support.marks import slow
from tests.support.pools import SMALL
from tests.support.reference import LARGER, reference_greedy_batch

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parent / "rotary.json").read_text())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
PLAIN = {"rope_type": "default", "rope_theta": 77.0}
# One pool a family, each configuration in a form of its own.
SCALED: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "qwen2": {"rope_parameters": YARN | {"attention_factor": 0.75}},
    "qwen3": {"rope_parameters": YARN},
    "qwen3_moe": {"rope_parameters": YARN | {"beta_fast": 16.0}, "num_local_experts": 6},
    "gemma2": {
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        "sliding_window": 16,
    },
}
PROMPTS = [[int(i) for i in np.random.default_rng(1).integers(3, 250, n)] for n in (2, 31, 150)]


@pytest.mark.parametrize("name", GOLDENS)
def test_the_formulas(name: str) -> None:
    """The reference formulas agree with what transformers computes, in float32."""
    golden = GOLDENS[name]
    if name == "linear":
        with pytest.raises(InvalidConfig, match="rope_scaling has rope_type='linear'"):
            rotation(golden["config"])
        return
    frequencies, scale = rotation(golden["config"])
    np.testing.assert_allclose(frequencies, golden["frequencies"], rtol=2e-5)
    assert scale == pytest.approx(golden["scale"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's checkpoint, with its configuration of `SCALED`."""

    def write(family: str, **random: Any) -> Path:
        without = ("rope_theta", "num_experts") if "rope_parameters" in SCALED[family] else ()
        if family == "qwen3":
            without = ("rope_theta",)
        return make(
            tmp_path_factory.mktemp(family),
            family,
            config=SCALED[family] | {"max_position_embeddings": 512},
            without=without,
            **random,
        )

    return write


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [("llama", 1), *slow(("qwen3", 2), *((each, 1) for each in SCALED if each != "llama"))],
)
def test_engines_rotate_by_the_configurations_frequencies(
    family: str, tp_size: int, checkpoint: Any
) -> None:
    """Ids and log-probabilities agree with the reference, which reads the same config.json."""
    folder = checkpoint(family, **(LARGER if tp_size > 1 else {}))
    with EnginePool(str(folder), devices=1, tp_size=tp_size, warmup="none", **SMALL) as pool:
        results = pool.generate_all(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
            return_logprob=True,
        )
    right = reference_greedy_batch(folder, PROMPTS, 6)
    for expected, result in zip(right, results, strict=True):
        assert min(expected.gaps) > 1e-3
        assert result["output_ids"] == expected.ids
        got = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", *slow("qwen3", "qwen3_moe")])
def test_each_form_passes_the_check(
    family: str, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every layer rotates by the formula, with the factor or the base of this format. Otherwise
    the pool would not open, or would log that it did not check."""
    caplog.set_level("WARNING", "enginepool")
    with EnginePool(str(checkpoint(family)), devices=1, warmup="none", **SMALL):
        pass
    assert "enginepool.rotary_not_checked" not in [record.message for record in caplog.records]


def test_an_original_context_beside_the_scaling(tmp_path: Path) -> None:
    """Upstream's Llama reads the original context beside the scaling. Other families and
    transformers 4 read the one inside it."""
    before = {"max_position_embeddings": 512, "original_max_position_embeddings": 32}
    make(tmp_path, "llama", config=SCALED["llama"] | before)
    pool = EnginePool(str(tmp_path), devices=1, warmup="none", **SMALL)
    with pytest.raises(InvalidConfig, match=r"embeddings=32, but rope_scaling has 128"):
        pool.open()
    for family in ("llama", "qwen3"):
        same = config_of(model_type=family, rope_scaling=YARN, original_max_position_embeddings=128)
        assert rotation(same).scale == rotation(config_of(rope_scaling=YARN)).scale


def test_what_upstream_writes_into_its_configuration_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine is compared with the file, even if upstream has changed its own configuration
    object."""
    model = module("sgl_jax.srt.models.llama").LlamaForCausalLM
    original = model.__init__

    def otherwise(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.rope_theta = 77.0
        original(self, config, *args, **kwargs)

    monkeypatch.setattr(model, "__init__", otherwise)
    folder = make(tmp_path, "llama", config={"rope_theta": 10000.0})
    with pytest.raises(InvalidConfig, match=r"layer 0 differs from \S+ \(rope_theta=10000"):
        EnginePool(str(folder), devices=1, warmup="none", **SMALL).open()


@pytest.fixture
def precise() -> Iterator[None]:
    """As in a pool, on an upstream that rounds frequencies."""
    applied = patches.apply([rotary_precision.PATCH])
    yield
    patches.revert(applied)


def model_of(*embeddings: Any) -> Any:
    """The part of upstream's model that rotates."""
    layers = [SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=one)) for one in embeddings]
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


def config_of(**fields: Any) -> dict[str, Any]:
    known = {"model_type": "llama", "head_dim": 128, "rope_theta": 10000.0}
    return known | {"max_position_embeddings": 512} | fields


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ("base", {"rope_theta": 10200.0}),
        ("llama3", {"rope_scaling": LLAMA3}),
        ("yarn", {"rope_scaling": YARN}),
        ("part", {"partial_rotary_factor": 0.5}),
        ("second layer", {"rope_parameters": {"a": PLAIN, "b": PLAIN | {"rope_theta": 78.0}},
                          "layer_types": ["a", "b"]}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("precise")
def test_the_check_sees_a_plain_embedding(dtype: str, wrong: str, fields: dict[str, Any]) -> None:
    """Upstream's plain embedding ignores what the configuration asks for. The error names the
    layer, the field and the entry."""
    base = 77.0 if wrong == "second layer" else 10000.0
    plain = embeddings().RotaryEmbedding(128, 128, 512, base, True, jnp.dtype(dtype))
    where = "layer 1" if wrong == "second layer" else "layer 0"
    with pytest.raises(InvalidConfig, match=f"{where} differs.*entry"):
        check_rotary(model_of(plain, plain), config_of(**fields))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("theta", [77.0, 10000.0, 5e6])
@pytest.mark.usefixtures("precise")
def test_the_check_passes_what_is_right(dtype: str, theta: float) -> None:
    plain = embeddings().RotaryEmbedding(128, 128, 512, theta, True, jnp.dtype(dtype))
    check_rotary(model_of(plain), config_of(rope_theta=theta))


@pytest.mark.parametrize("field", ["attention_factor", "truncate", "beta_slow"])
def test_the_check_sees_a_part_of_yarn(field: str) -> None:
    """Upstream's own YaRN ignores one more field of the configuration."""
    value = {"attention_factor": 0.9, "truncate": False, "beta_slow": 4.0}[field]
    yarn = embeddings().YarnRotaryEmbedding(128, 128, 512, 10000.0, True, jnp.float32, 4.0, 128)
    check_rotary(model_of(yarn), config_of(rope_scaling=YARN))
    with pytest.raises(InvalidConfig, match=f"differs from.*{field}"):
        check_rotary(model_of(yarn), config_of(rope_scaling=YARN | {field: value}))


def embeddings() -> Any:
    return module("sgl_jax.srt.layers.embeddings")


def test_a_model_of_other_parts_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "enginepool")
    check_rotary(SimpleNamespace(model=SimpleNamespace()), config_of())
    assert [record.message for record in caplog.records] == ["enginepool.rotary_not_checked"]
    check_rotary(None, config_of(model_type="gemma4"))  # not one of those that are known
