"""What a request gets does not depend on who else is in its batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from tests.support.checkpoints import Tensors, make
from tests.support.forced import logprobs, output_logits
from tests.support.pools import SMALL, MakePool

PROMPTS = [[65, 66, 67], [70, 71], [90, 91, 92, 93], [101, 33]]
NAMED = [0, 7, 200, 271]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.3, "sampling_seed": 5, "top_p": 0.9}
PENALISED = {"temperature": 0.0, "frequency_penalty": 1.0}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "best at a temperature": {"temperature": 0.4, "top_k": 1},
    "sampled": {"temperature": 0.7, "sampling_seed": 3},
    "cold": {"temperature": 0.01, "sampling_seed": 3},
}
COMPANY = {"alone": [], "greedy": [GREEDY] * 3, "sampled": [GREEDY, SAMPLED, PENALISED]}


def first_of(pool: EnginePool, params: list[dict[str, Any]]) -> dict[str, Any]:
    """The first result of requests that are prefilled together."""
    pool.flush_cache()
    results = pool.generate_all(
        input_ids=PROMPTS[: len(params)],
        sampling_params=[{"max_new_tokens": 9, "ignore_eos": True} | one for one in params],
        return_logprob=True,
        top_logprobs_num=4,
        token_ids_logprob=NAMED,
    )
    return results[0]


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("law", LAWS)
def test_reported_values(
    make_pool: MakePool, model_dir: Callable[[str], Path], law: str, company: str
) -> None:
    """The values of the first token and of later tokens follow the request's own temperature and
    its own ids, for the most probable ids and for named ones, however improbable."""
    params = LAWS[law]
    result = first_of(make_pool("qwen3", 1), [params, *COMPANY[company]])
    ids, meta = result["output_ids"], result["meta_info"]
    [rows] = output_logits(model_dir("qwen3"), PROMPTS[:1], [ids])
    wanted = logprobs(rows, params["temperature"] or 1.0)
    # In float32 a logit of 20 divided by .01 is no better than this.
    near = 1e-4 if params["temperature"] != 0.01 else 1e-2
    got = [entry[0] for entry in meta["output_token_logprobs"]]
    assert got == pytest.approx(wanted[range(len(ids)), ids], abs=near)
    for place, top in enumerate(meta["output_top_logprobs"]):
        best = np.sort(wanted[place])[::-1][:4]
        assert [entry[0] for entry in top] == pytest.approx(best, rel=1e-5, abs=near)
    for place, named in enumerate(meta["output_token_ids_logprobs"]):
        values = [entry[0] for entry in named]
        assert values == pytest.approx(wanted[place, NAMED], rel=1e-5, abs=near)


def test_ties(tmp_path: Path) -> None:
    """If two ids are equally probable, a greedy request takes the first, whatever else is in the
    batch. Logits of bfloat16 are often equal."""

    def twins(tensors: Tensors) -> Tensors:
        table = tensors["model.embed_tokens.weight"]
        table[1::2] = table[0::2]
        return tensors

    folder = make(tmp_path, "qwen3", seed=1, edit=twins)
    with EnginePool(str(folder), devices=1, warmup="none", **SMALL) as pool:
        alone = first_of(pool, [GREEDY])
        for company in COMPANY.values():
            for greedy in (GREEDY, LAWS["best at a temperature"]):
                result = first_of(pool, [greedy, *company])
                assert result["output_ids"] == alone["output_ids"]
                assert not any(one % 2 for one in result["output_ids"])
