"""Configurations are read alike, whichever version of transformers wrote them: by engines, reloads
and plans.

What transformers 5 writes is recorded in transformers5.json (scripts/record_goldens.py). Engines
that compute what it says are in test_rotary.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from enginepool import InvalidConfig, InvalidWeights
from enginepool.config import PoolConfig
from enginepool.model_config.config_json import as_read, load, overrides
from enginepool.runtime.served_config import check_config
from enginepool.sizing.shape import read_shape, shape_of
from tests.support.reference import ARCHITECTURES

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "transformers5.json").read_text())
GIVEN_THETA = {"json_model_override_args": '{"rope_theta": 5.0}'}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A directory as transformers 5 writes it, one as transformers 4 writes it, and the fields."""
    fields = CASES[request.param]["config"]
    fields = fields | {"architectures": [ARCHITECTURES[fields["model_type"]]]}
    new, old = tmp_path / "new", tmp_path / "old"
    write(new, CASES[request.param]["written"] | {"architectures": fields["architectures"]})
    AutoConfig.for_model(**json.loads(json.dumps(fields))).save_pretrained(old)
    return new, old, fields


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def upstreams(folder: Path, **server_args: Any) -> Any:
    """The model's configuration as a pool's engine has it."""
    from sgl_jax.srt.configs.model_config import ModelConfig
    from sgl_jax.srt.server_args import ServerArgs

    args = PoolConfig(str(folder), server_args=server_args).for_engine("cpu", [0])
    return ModelConfig.from_server_args(ServerArgs(**args))


def test_engines_read_what_transformers_5_wrote(
    case: tuple[Path, Path, dict[str, Any]],
) -> None:
    """Every field that transformers 4 writes reaches upstream's model with its value."""
    new, old, fields = case
    found, expected = upstreams(new), upstreams(old)
    assert found.dtype == expected.dtype
    assert found.context_len == expected.context_len
    for name in json.loads((old / "config.json").read_text()).keys() - {"transformers_version"}:
        assert getattr(found.hf_config, name) == getattr(expected.hf_config, name), name
    assert found.hf_config.rope_theta == fields["rope_theta"]


def test_plans_and_reloads_read_the_same(case: tuple[Path, Path, dict[str, Any]]) -> None:
    new, old, fields = case
    assert read_shape(str(new)) == shape_of(AutoConfig.for_model(**fields))
    check_config(new, PoolConfig(str(old)))
    check_config(old, PoolConfig(str(new)))


def test_reloads_see_another_base(tmp_path: Path) -> None:
    """A different base is found between the two formats as within one. Fields that the user
    overrides do not count."""
    one = write(tmp_path / "one", CASES["qwen2"]["written"])
    rope = {"rope_theta": 78.0, "rope_type": "default"}
    other = write(tmp_path / "other", CASES["qwen2"]["written"] | {"rope_parameters": rope})
    with pytest.raises(InvalidWeights, match=r"rope_theta=78.0 \(served: 77.0\)"):
        check_config(other, PoolConfig(str(one)))
    check_config(other, PoolConfig(str(one), server_args=GIVEN_THETA))


def test_the_users_overrides_come_last(tmp_path: Path) -> None:
    """The user's overrides may have either format, over a file of either format."""
    new = write(tmp_path / "new", CASES["qwen3_moe"]["written"])
    old = write(tmp_path / "old", {"model_type": "qwen3", "rope_theta": 77.0})
    rope = {"rope_theta": 5.0, "rope_type": "yarn", "factor": 2.0}
    given = {"json_model_override_args": json.dumps({"rope_parameters": rope})}
    for folder in (new, old):
        plain = load(str(folder), override_args=GIVEN_THETA["json_model_override_args"])
        assert plain.rope_theta == 5.0
        scaled = load(str(folder), override_args=given["json_model_override_args"])
        assert (scaled.rope_theta, scaled.rope_scaling["factor"]) == (5.0, 2.0)
    args = PoolConfig(str(new), server_args=GIVEN_THETA).for_engine("cpu", [0])
    assert json.loads(args["json_model_override_args"])["rope_theta"] == 5.0
    assert json.loads(args["json_model_override_args"])["num_experts"] == 6
    fewer = '{"num_local_experts": 5}'
    assert load(str(new), override_args=fewer).num_experts == 5
    assert json.loads(overrides(CASES["qwen3_moe"]["written"], fewer))["num_experts"] == 5


def test_layers_of_one_kind() -> None:
    """Parameters by layer type become the model's parameters if all of them are equal. Otherwise
    they stay as they are."""
    one = {"rope_theta": 5.0, "rope_type": "default"}
    by_type = {"full_attention": one, "sliding_attention": dict(one)}
    gemma = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    read = as_read(gemma | {"rope_parameters": by_type})
    assert read == gemma | {"rope_theta": 5.0, "rope_scaling": None}
    by_type["sliding_attention"] = one | {"rope_theta": 6.0}
    differing = gemma | {"rope_parameters": by_type}
    assert as_read(differing) == differing


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", "rope_theta": 77.0}


def test_two_kinds_of_scaling(tmp_path: Path) -> None:
    """A model card says "add `rope_scaling`", and transformers 5 wrote the file. Then each
    transformers reads another field. Two equal fields pass, and so do overrides."""
    both = CASES["qwen3"]["written"] | {"rope_parameters": PLAIN, "rope_scaling": YARN}
    folder = write(tmp_path / "both", both)
    says = r"config\.json: rope_scaling=.*yarn.* and rope_parameters=.*keep one of the two"
    for read in (PoolConfig(str(folder)).check_model, lambda: read_shape(str(folder))):
        with pytest.raises(InvalidConfig, match=says):
            read()
    new = CASES["qwen3"]["written"] | {"rope_parameters": PLAIN}
    given = write(tmp_path / "given", new)
    override = json.dumps({"rope_scaling": YARN})
    assert load(str(given), override_args=override).rope_scaling["factor"] == 4.0
    for scaling in (None, {"type": "default"}):
        same = load(str(write(tmp_path / "same", new | {"rope_scaling": scaling})))
        assert (same.rope_theta, same.rope_scaling) == (77.0, None)
    with pytest.raises(InvalidConfig, match="json_model_override_args: rope_scaling="):
        load(str(given), override_args=json.dumps({"rope_scaling": YARN, "rope_parameters": PLAIN}))


def test_configurations_that_need_no_translation(tmp_path: Path) -> None:
    """A configuration of transformers 4 gives no overrides. Nor do names that its class has,
    such as Mixtral's experts."""
    qwen3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 77.0}
    for fields in (
        qwen3 | {"torch_dtype": "bfloat16"},
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "unheard of", "num_local_experts": 4},
    ):
        assert overrides(fields) == "{}"
    folder = write(tmp_path, qwen3)
    assert "json_model_override_args" not in PoolConfig(str(folder)).for_engine("cpu", [0])


@pytest.mark.parametrize("named", [None, [], ["LlamaModel"], ["LlamaForSequenceClassification"]])
def test_the_family_decides(tmp_path: Path, named: Any) -> None:
    """As in transformers, the family decides if `architectures` is missing or names no class
    that generates. The user's overrides come last."""
    fields = CASES["llama"]["written"] | {"architectures": named}
    folder = write(tmp_path, fields)
    assert upstreams(folder).hf_config.architectures == ["LlamaForCausalLM"]
    given = {"json_model_override_args": '{"architectures": ["Qwen2ForCausalLM"]}'}
    assert upstreams(folder, **given).hf_config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("text", ["{", "[]", {"rope_theta": 5.0}])
def test_overrides_that_are_no_object(tmp_path: Path, text: Any) -> None:
    folder = write(tmp_path, {"model_type": "qwen3"})
    with pytest.raises(InvalidConfig, match="json_model_override_args="):
        load(str(folder), override_args=text)
