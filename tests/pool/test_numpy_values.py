"""NumPy's and JAX's scalars and arrays are accepted like Python's values, and results have none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidRequest
from tests.pool.test_bad_input import GREEDY, IDS
from tests.support.pools import SMALL, MakePool

PLAIN = (dict, list, tuple, str, int, float, type(None))


def is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(k) is str and is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in PLAIN


@pytest.fixture(scope="module")
def expected(pool: EnginePool) -> list[int]:
    return pool.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
def test_ids(pool: EnginePool, expected: list[int], array: Any) -> None:
    """An array of one dimension is a prompt and gives a dict. Two dimensions are a list of
    prompts, and so are lists of scalars and of arrays."""
    for one in (array(IDS), [array(token) for token in IDS], [array(IDS[0]), *IDS[1:]]):
        result = pool.generate(input_ids=one, sampling_params=GREEDY)
        assert result["output_ids"] == expected
        assert is_plain(result)
        assert pool.generate_all(input_ids=one, sampling_params=GREEDY)[0]["output_ids"] == expected
    for several in (array([IDS, IDS]), [array(IDS), IDS], (array(IDS), tuple(IDS))):
        results = pool.generate(input_ids=several, sampling_params=GREEDY)
        assert [result["output_ids"] for result in results] == [expected] * 2
    engine = pool.engines[0]
    result = engine.generate(input_ids=array(IDS), sampling_params=GREEDY)
    assert result["output_ids"] == expected


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(5, "one entry per prompt, got 5"), ([65.0], "not an integer"), ([[[65]]], "not an integer")],
)
def test_no_ids(pool: EnginePool, array: Any, value: Any, words: str) -> None:
    """Arrays of other dimensions, or of numbers that are no integers, are refused."""
    with pytest.raises(InvalidRequest, match=words):
        pool.generate(input_ids=array(value))


def test_lone_iterator(pool: EnginePool, expected: list[int]) -> None:
    """An iterator of ids, which can be read only once, is one prompt."""
    result = pool.generate(input_ids=iter(IDS), sampling_params=GREEDY)
    assert result["output_ids"] == expected


def test_texts(pool: EnginePool) -> None:
    want = pool.generate("12+7=", GREEDY)["output_ids"]
    for one in (np.str_("12+7="), np.array("12+7=")):
        assert pool.generate(one, GREEDY)["output_ids"] == want
    results = pool.generate(np.array(["12+7=", "12+7="]), GREEDY)
    assert [result["output_ids"] for result in results] == [want, want]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_parameters(pool: EnginePool, array: Any) -> None:
    """Every sampling parameter and every option, as an array without dimensions or a scalar."""
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "min_p": 0.25, "top_k": 4, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "max_new_tokens": 6, "min_new_tokens": 2, "n": 2,
        "sampling_seed": 7, "ignore_eos": True, "skip_special_tokens": False,
        "stop_token_ids": [65, 66], "repetition_penalty": 1.0,
    }  # fmt: skip
    want = pool.generate(input_ids=IDS, sampling_params=given, top_logprobs_num=2)
    arrays = {name: array(value) for name, value in given.items()}
    scalars = {
        name: [one[()] for one in value] if value.ndim else value[()]
        for name, value in arrays.items()
    }
    for params in (arrays, scalars, [arrays], np.array([arrays])):
        got = pool.generate_all(
            input_ids=[IDS],
            sampling_params=params,
            return_logprob=array(True),
            top_logprobs_num=array(2),
            timeout=array(100.0),
        )
        assert [one["output_ids"] for one in got] == [one["output_ids"] for one in want]
        assert is_plain(got)


def test_upstreams_object(pool: EnginePool, expected: list[int]) -> None:
    """Upstream's SamplingParams with NumPy's values, alone or in a list."""
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=np.float32(0.0),  # type: ignore[arg-type]
        max_new_tokens=np.int64(4),  # type: ignore[arg-type]
        ignore_eos=True,
    )
    for given in (params, [params]):
        results = pool.generate_all(input_ids=[IDS], sampling_params=given)  # type: ignore[arg-type]
        assert results[0]["output_ids"] == expected


def test_steering(make_pool: MakePool, model_dir: Any) -> None:
    """A request's id, a flag, a version of weights."""
    pool = make_pool("qwen3", 1, warmup="none")
    report = pool.update_weights(model_dir("qwen3"), weight_version=np.int64(7))  # type: ignore
    assert type(report.weight_version) is int
    result = pool.generate(input_ids=IDS, sampling_params=GREEDY)
    assert result["meta_info"]["weight_version"] == 7
    assert is_plain(result)
    assert pool.abort_request(np.str_("nobody's")) == 0
    assert pool.abort_request(abort_all=np.bool_(True)) == 0  # type: ignore[arg-type]


@pytest.mark.slow
def test_constructor(expected: list[int], model_dir: Any) -> None:
    """Counts, device ids and upstream's options. An invalid id is refused."""
    model = str(model_dir("qwen3"))
    options = {**SMALL, "context_length": np.int64(512), "warmup": "none"}
    for devices in (np.int64(1), np.array([1]), [np.int64(2)], np.array(jax.local_devices()[:1])):
        with EnginePool(
            model, devices=devices, tp_size=np.int32(1), max_queued=np.int64(5),  # type: ignore
            step_timeout=np.float32(300), restart=np.bool_(True), **options,  # type: ignore
        ) as pool:  # fmt: skip
            result = pool.generate(input_ids=IDS, sampling_params=GREEDY)
            assert result["output_ids"] == expected
            assert type(pool.config.tp_size) is type(pool.config.max_queued) is int
    for devices in ([True], np.array([1.0]), [[0], [1]], np.array(True)):
        with pytest.raises(InvalidConfig, match="devices"):
            EnginePool(model, devices=devices, **options).open()  # type: ignore[arg-type]
