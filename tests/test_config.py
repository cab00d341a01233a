"""Options and devices that are refused, and the words of the errors."""

from typing import Any

import jax
import pytest

from enginepool import EnginePool, InvalidConfig
from enginepool.config import PoolConfig
from enginepool.devices import resolve_devices
from enginepool.runtime.startup import advise
from enginepool.server_args import REFUSED, REFUSED_ENVIRONMENT, REFUSED_PREFIXES
from enginepool.sizing.chips import V6E
from tests.support.pools import SMALL
from tests.support.published import CONFIGS


def server_args() -> dict[str, Any]:
    """Upstream's options and their defaults."""
    import dataclasses

    from sgl_jax.srt.server_args import ServerArgs

    return {field.name: field.default for field in dataclasses.fields(ServerArgs)}


OWN = ("warmup", "tp_size", "max_decode_steps", "devices")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_runing_requests": 4},
            "unknown option max_runing_requests=4; did you mean max_running_requests?",
        ),
        ({"device_count": 4}, "unknown option device_count=4"),
        ({"max_model_len": 100}, "unknown option max_model_len=100; here it is context_length"),
        ({"devices": "4"}, "devices='4': expected a count, a list of device ids, or None for all"),
        ({"tp": 2}, "unknown option tp=2; did you mean tp_size?"),
        ({"warm_up": "none"}, "unknown option warm_up='none'; did you mean warmup?"),
        ({"warmup": "fast"}, "warmup='fast': expected one of sequential, parallel, none"),
        ({"tp_size": 0}, "tp_size=0: expected a count of devices, 1 or more"),
        ({"tp_size": 1.5}, "tp_size=1.5: expected a count"),
        ({"tp_size": True}, "tp_size=True: expected a count"),
        ({"max_decode_steps": 0}, "max_decode_steps=0: expected a count from 1 to 8"),
        ({"max_decode_steps": 9}, "max_decode_steps=9: expected a count from 1 to 8; 1 for"),
        ({"dp_size": 2}, "dp_size=2: each engine of a pool is a replica; use devices="),
        ({"nnodes": 2}, "nnodes=2: a pool lives in one process"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init=True: .*input_ids="),
        ({"device_indexes": [1]}, r"device_indexes=\[1\]: the pool sets it itself from devices="),
        ({"device": "cpu"}, "device='cpu': the pool sets it itself"),
        ({"model_path": "m"}, "model_path='m': name the model as the first argument"),
        ({"disable_overlap_schedule": False}, "overlap schedule runs the forward on a second"),
        ({"disable_precompile": True}, 'disable_precompile=True: use warmup="none"'),
        ({"enable_deterministic_sampling": True}, 'sampling_params\\["sampling_seed"\\]'),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding is not supported in a pool"),
        ({"disaggregation_mode": "prefill"}, "disaggregation is not supported in a pool"),
        ({"lora_paths": ["a"]}, "load_lora_adapter"),
        ({"enable_lora": True}, "max_lora_rank"),
        ({"multimodal": True}, "not supported in a pool"),
        ({"allow_auto_truncate": True}, "a pool never cuts a prompt"),
        ({"enable_mixed_chunk": True}, "mixes prefill and decode"),
        ({"model_layer_nums": "2"}, "model_layer_nums='2': expected a count"),
        ({"model_layer_nums": 0}, "model_layer_nums=0: expected a count"),
        ({"precompile_bs_paddings": 4}, "precompile_bs_paddings=4: expected a list of counts"),
        ({"precompile_token_paddings": ["64"]}, "expected a list of counts"),
    ],
)
def test_option(options: dict[str, Any], words: str) -> None:
    """The constructor refuses a wrong option with its value and the reason or remedy."""
    (name,) = options
    upstreams = "unknown" not in words and name not in OWN
    if upstreams and name not in server_args():
        pytest.skip(f"the installed upstream has no option {name}")
    with pytest.raises(InvalidConfig, match=words) as caught:
        EnginePool("model", **options)
    assert isinstance(caught.value, ValueError)
    assert name in str(caught.value)


def test_every_refused_option() -> None:
    """Each refused option of the installed upstream is refused if set, and accepted at
    upstream's default. `device` and `model_path` are always refused."""
    always = {"device", "model_path"}
    for name, default in server_args().items():
        refused = name in REFUSED or name.startswith(tuple(REFUSED_PREFIXES))
        if not refused:
            continue
        with pytest.raises(InvalidConfig, match=name):
            EnginePool("model", **{name: "something else"})
        if name not in always:
            EnginePool("model", **{name: default})


def test_options_pass_through() -> None:
    """All other options reach upstream's ServerArgs unchanged, over the platform's defaults."""
    config = PoolConfig("model", server_args={"page_size": 16, "disable_overlap_schedule": True})
    args = config.for_engine("cpu", [2])
    assert (args["page_size"], args["model_path"], args["device_indexes"]) == (16, "model", [2])
    assert args["attention_backend"] == "native"
    assert args["max_total_tokens"] <= 2048
    assert args.keys() <= server_args().keys()
    assert "max_total_tokens" not in config.for_engine("tpu", [0])


def test_tpu_defaults() -> None:
    """On a TPU there is a page size for which its kernel compiles, and a limited batch. A memory
    fraction is set only if memory and model are known. The user's values replace defaults."""
    unknown = PoolConfig("model").for_engine("tpu", [0])
    assert (unknown["page_size"], unknown["max_running_requests"]) == (128, 256)
    assert "mem_fraction_static" not in unknown
    assert "mem_fraction_static" not in PoolConfig("model").for_engine("tpu", [0], V6E.hbm_bytes)
    known = PoolConfig(CONFIGS["4B"], server_args={"context_length": 4096})
    assert known.for_engine("tpu", [0], V6E.hbm_bytes)["mem_fraction_static"] == 0.71
    for platform in ("cpu", "gpu"):
        args = known.for_engine(platform, [0], V6E.hbm_bytes)
        assert not {"page_size", "mem_fraction_static"} & args.keys()
    given = {"page_size": 1, "mem_fraction_static": 0.9, "max_running_requests": 8}
    args = PoolConfig(CONFIGS["4B"], server_args=given).for_engine("tpu", [0], V6E.hbm_bytes)
    assert {name: args[name] for name in given} == given


def test_an_opening_pool_logs_problems_on_a_tpu(caplog: pytest.LogCaptureFixture) -> None:
    """Each problem is a warning with its remedy. The log also says how the defaults let a swap
    work."""
    caplog.set_level("INFO", "enginepool")

    def said(**server_args: Any) -> list[Any]:
        caplog.clear()
        config = PoolConfig(CONFIGS["4B"], server_args=server_args)
        free = V6E.hbm_bytes
        advise(config, config.for_engine("tpu", [0], free), free)
        return caplog.records

    (memory,) = said(context_length=4096)
    assert memory.message == "enginepool.tpu_memory"
    assert (memory.mem_fraction_static, memory.staging) == (0.71, "double")
    (memory,) = said(context_length=40_960)
    assert (memory.mem_fraction_static, memory.staging) == (0.88, "stream")
    page, memory = said(context_length=4096, page_size=1)
    assert (page.levelname, memory.levelname) == ("WARNING", "INFO")
    assert page.message == "enginepool.tpu_advice"
    assert "page_size=1" in page.problem
    assert "128" in page.remedy


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable that cannot work in a pool is refused with the reason. If it is
    off, it does not matter."""
    for name in REFUSED_ENVIRONMENT:
        monkeypatch.setenv(name, "1")
        with pytest.raises(InvalidConfig, match=f"environment variable {name}='1': .*unset it"):
            EnginePool("model")
        monkeypatch.setenv(name, "0")
        EnginePool("model")


def ids(groups: list[list[jax.Device]]) -> list[list[int]]:
    return [[device.id for device in group] for group in groups]


def test_devices() -> None:
    """A count, ids, devices, or nothing for all. `tp_size` neighbours make one engine. The order
    is the caller's."""
    assert ids(resolve_devices(None, 1)) == [[0], [1], [2], [3]]
    assert ids(resolve_devices(2, 1)) == [[0], [1]]
    assert ids(resolve_devices([3, 1], 1)) == [[3], [1]]
    assert ids(resolve_devices(jax.devices()[2:], 1)) == [[2], [3]]
    assert ids(resolve_devices(2, 2)) == [[0, 1], [2, 3]]
    assert ids(resolve_devices([0, 1, 3, 2], 2)) == [[0, 1], [3, 2]]
    assert ids(resolve_devices(None, 3)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("devices", "tp_size", "words"),
    [
        (0, 1, "devices=0: expected a count of 1 or more"),
        (-1, 1, "devices=-1: expected a count of 1 or more"),
        (True, 1, "devices=True: expected a count"),
        ([], 1, r"devices=\[\]"),
        ([0, 0], 1, "id 0 is named twice"),
        ([0, 9], 1, r"unknown id 9; JAX has \[0, 1, 2, 3\]"),
        ([0, "1"], 1, "unknown id '1'"),
        ("0", 1, "devices='0'"),
        (1.5, 1, "devices=1.5"),
        ([0, 1, 2], 2, "3 devices cannot be split into engines of tp_size=2"),
        (None, 8, "tp_size=8 needs more than the 4 local devices"),
        (5, 1, "5 devices are needed and JAX has 4 .*xla_force_host_platform_device_count=5"),
        (3, 2, "6 devices are needed and JAX has 4"),
    ],
)
def test_bad_devices(devices: Any, tp_size: int, words: str) -> None:
    """Devices that do not exist, are named twice or cannot be divided are refused when the pool
    opens. The error says how to get more. Once they exist, the same pool opens."""
    with pytest.raises(InvalidConfig, match=words):
        EnginePool("model", devices=devices, tp_size=tp_size, **SMALL).open()
