"""The toy on the TPU's attention kernel."""

from typing import Any

import numpy as np
import pytest

from enginepool import toy
from tests.integrations.conftest import OpenFlash
from tests.support.forced import LOGPROB_TOLERANCE, logprobs, output_logits
from tests.support.marks import slow

SUMS = {"12+7=": "19", "30+4=": "34", "5+9=": "14", "88+1=": "89", "41+50=": "91", "3+33=": "36"}
TOLERANCES = {"float32": LOGPROB_TOLERANCE, "bfloat16": 0.02}
PARAMS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 5}


@pytest.mark.timeout(900)  # XLA compiles what the interpreter makes of a kernel, for every shape
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_sums(open_flash: OpenFlash, dtype: str):
    """A prompt alone and in batches, in both dtypes. The ids are those of the reference, whose
    best logit leads by 2 at every step. In bfloat16 the kernel keeps two rows in an element, and
    rounds as an engine on native attention does."""
    with open_flash(toy.checkpoint(), dtype=dtype) as pool:
        alone = pool.generate("12+7=", PARAMS)
        results = pool.generate_all(list(SUMS), PARAMS, return_logprob=True)
    assert alone["text"] == "19"
    assert [result["text"] for result in results] == list(SUMS.values())
    prompts = [list(text.encode()) for text in SUMS]
    logits = output_logits(toy.checkpoint(), prompts, [r["output_ids"] for r in results])
    for result, rows in zip(results, logits, strict=True):
        assert result["output_ids"] == rows.argmax(axis=-1).tolist()
        values = [value for value, *_ in result["meta_info"]["output_token_logprobs"]]
        assert np.abs(values - logprobs(rows).max(axis=-1)).max() < TOLERANCES[dtype]
