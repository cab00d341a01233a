"""The fuzz finds the faults that it should find. It runs in `tests/integrations/test_fuzz.py`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_law import Law
from benchmarks.span_checks import Finished
from enginepool import EnginePool
from tests.support import faults
from tests.support.forced import output_logits
from tests.support.pools import MakePool

PARAMS: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "sampling_seed": 5,
    "ignore_eos": True,
}


def test_an_engine_that_failed_is_seen(make_pool: MakePool) -> None:
    """Even if its requests continued and no caller got an error."""
    pool = make_pool(devices=1, max_restarts=10)
    before = len(pool.events())
    faults.raise_in_step(pool, 0)
    result: Any = pool.generate(input_ids=[65, 66], sampling_params={"max_new_tokens": 2})
    assert len(result["output_ids"]) == 2
    assert "device 0 is gone" in " ".join(fuzz.failures(pool.events()[before:]))


WRONG: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "continues after end id": lambda params, _: params.update(
        ignore_eos=False, stop_token_ids=[*range(256)]
    ),
    "ended without a reason": lambda params, _: params.update(max_new_tokens=13),
    "only 12 tokens": lambda params, _: params.update(min_new_tokens=13, max_new_tokens=13),
    "is forbidden": lambda params, _: params.update(regex="[0-9]+"),
    "is better by": lambda params, _: params.update(temperature=0),
    "outside of what": lambda params, _: params.update(top_p=1e-6),
    "the reference": lambda params, _: params.update(frequency_penalty=0.5, temperature=0.81),
    "which is not left": lambda _, result: result["meta_info"]["output_sampling_mask"].update(
        indptr=[0, 272, *[272] * 11], ids=[*range(272)]
    ),
    "its ids": lambda _, result: result.update(text="another"),
    "of other ids": lambda _, result: result["output_ids"].reverse(),
    "ended as": lambda _, result: result["meta_info"].update(finish_reason={"type": "abort"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_output_is_found(
    pool: EnginePool, model_dir: Callable[[str], Any], wrong: str
) -> None:
    """The same output is right for its own parameters and wrong for others."""
    folder, prompt = model_dir("qwen3"), [65, 66, 67]
    law = Law(folder, {258})
    result: Any = pool.generate(
        input_ids=prompt, sampling_params=PARAMS, return_logprob=True, return_sampling_mask=True
    )
    [rows] = output_logits(folder, [prompt], [result["output_ids"]])
    assert law.faults(Finished(prompt, result), PARAMS, rows) == []
    params, other = dict(PARAMS), copy.deepcopy(result)
    WRONG[wrong](params, other)
    assert wrong in " ".join(law.faults(Finished(prompt, other), params, rows))
