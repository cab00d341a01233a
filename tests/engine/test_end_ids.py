"""`min_new_tokens` and the end ids that config.json and generation_config.json name."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest
from enginepool.toy.files import END_ID
from tests.support.checkpoints import set_config, set_json
from tests.support.forced import logprobs, output_logits
from tests.support.pools import SMALL
from tests.support.reference import make_random_model

CONFIG, GENERATION = list(range(20, 90)), list(range(90, 200))
LEAST, LONGEST = 6, 12
PROMPTS = [[65 + i, 66, *range(9 + i, 9 + 4 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def many_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """An engine on a checkpoint with many end ids. An output comes to one at once."""
    folder = make_random_model(tmp_path_factory.mktemp("ends"), "qwen3", seed=1)
    set_config(folder, {"eos_token_id": CONFIG})
    set_json(folder / "generation_config.json", {"eos_token_id": GENERATION})
    with EnginePool(str(folder), devices=1, warmup="none", **SMALL) as pool:
        yield pool


def test_no_output_ends_before(many_ends: EnginePool) -> None:
    """This holds for the first token and in steady decode, greedy and sampled. No other id is
    banned. Log-probabilities are of the remaining ids. Then outputs end at such an id."""
    ways = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}]
    both = {"max_new_tokens": LONGEST, "min_new_tokens": LEAST}
    params = [ways[i % 3] | both | {"sampling_seed": i} for i in range(len(PROMPTS))]
    results = many_ends.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    ends = [*CONFIG, *GENERATION, END_ID]
    outputs = [result["output_ids"] for result in results]
    assert min(map(len, outputs)) >= LEAST
    assert any(len(ids) < LONGEST for ids in outputs)
    model = Path(many_ends.config.model)
    for rows, ids, one, result in zip(
        output_logits(model, PROMPTS, outputs), outputs, params, results, strict=True
    ):
        assert not set(ids[:-1]) & set(ends)
        rows = rows.astype(np.float64)
        rows[np.ix_(range(LEAST), ends)] = -np.inf
        wanted = logprobs(rows)[range(len(ids)), ids]
        got = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(wanted, abs=1e-4), one


def test_some_token_must_be_left(many_ends: EnginePool) -> None:
    """These ids count among those that cannot be sampled."""
    size = many_ends.runtime.input_processor.limits.vocab_size
    rest = sorted({*range(size)} - {*CONFIG, *GENERATION, END_ID})
    params = {"max_new_tokens": 2, "min_new_tokens": 2, "stop_token_ids": rest}
    with pytest.raises(InvalidRequest, match="no token may be sampled; leave one out"):
        many_ends.generate(input_ids=PROMPTS[0], sampling_params=params)
