"""Results as arrays: the positions of values, constant shapes, and what is refused."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool import InvalidRequest, rl

PAD = 7
IDS = st.integers(0, 2**31 - 1)
FINISHES = st.sampled_from(["stop", "length", "abort"])


def result(
    prompt_index: int,
    prompt: list[int],
    output: list[int],
    *,
    sample_index: int = 0,
    finish: str = "stop",
    spans: list[list[Any]] | None = None,
) -> dict[str, Any]:
    """A result as `generate_all` returns it."""
    return {
        "text": "",
        "output_ids": output,
        "meta_info": {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "prompt_index": prompt_index,
            "sample_index": sample_index,
            "weight_versions": [[0, len(output), 0]] if spans is None else spans,
            "output_token_logprobs": [(-float(i % 97) / 8, i, None) for i in output],
        },
    }


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts with up to four results each, in spans of integer versions."""
    prompts = draw(st.lists(st.lists(IDS, min_size=1, max_size=9), min_size=1, max_size=4))
    results = []
    for index, prompt in enumerate(prompts):
        for sample in range(draw(st.integers(0, 4))):
            output = draw(st.lists(IDS, max_size=9))
            edges = sorted(draw(st.sets(st.integers(0, len(output)), max_size=3)))
            edges = sorted({0, *edges, len(output)})
            spans = [[a, b, 3 * n] for n, (a, b) in enumerate(pairwise(edges))]
            finish = draw(FINISHES)
            made = result(index, prompt, output, sample_index=sample, finish=finish, spans=spans)
            results.append(made)
    return prompts, results


@settings(deadline=None)
@given(call=calls(), wider=st.integers(0, 3))
def test_every_cell(call: tuple[Any, Any], wider: int) -> None:
    """Each cell is compared: prompts end at the right, outputs begin at the left, and aborted
    results are padding."""
    prompts, results = call
    max_prompt = max((len(prompt) for prompt in prompts), default=1) + wider
    batch = rl.pad_results(results, prompts, pad_id=PAD, max_prompt=max_prompt, max_output=9)
    assert batch.prompt_ids.shape == batch.prompt_mask.shape == (len(results), max_prompt)
    for row, one in enumerate(results):
        meta = one["meta_info"]
        finish = meta["finish_reason"]["type"]
        prompt = prompts[meta["prompt_index"]]
        for column in range(max_prompt):
            at = column - (max_prompt - len(prompt))
            assert batch.prompt_mask[row, column] == (at >= 0)
            assert batch.prompt_ids[row, column] == (prompt[at] if at >= 0 else PAD)
        for column in range(9):
            cell = [array[row, column].item() for array in batch[2:6]]
            if column >= len(one["output_ids"]) or finish == "abort":
                assert cell == [PAD, False, 0.0, -1]
            else:
                logprob, token_id, _ = meta["output_token_logprobs"][column]
                [version] = [v for a, b, v in meta["weight_versions"] if a <= column < b]
                assert cell == [token_id, True, logprob, version]
        assert [array[row].item() for array in batch[6:10]] == [
            meta["prompt_index"],
            meta["sample_index"],
            finish == "abort",
            finish == "length",
        ]
    dtypes = [np.int32, bool, np.int32, bool, np.float32, np.int32, np.int32, np.int32, bool, bool]
    assert [array.dtype for array in batch[:10]] == dtypes


@settings(deadline=None)
@given(call=calls(), multiple=st.integers(1, 6))
def test_widths_are_the_least_multiples_that_fit(call: tuple[Any, Any], multiple: int) -> None:
    """Without a maximum: every width is a multiple, and the smallest that fits."""
    prompts, results = call
    batch = rl.pad_results(results, prompts, pad_id=PAD, pad_to_multiple_of=multiple)
    for mask in (batch.prompt_mask, batch.output_mask):
        width, longest = mask.shape[1], mask.sum(axis=1).max(initial=0)
        assert width % multiple == 0
        assert width >= longest
        assert width == multiple or width - multiple < longest


def test_a_jitted_function_takes_it_and_compiles_once() -> None:
    """A batch is a pytree. Batches of other lengths in the same bucket use the same program."""
    traced = []

    @jax.jit
    def total(batch: rl.RolloutBatch) -> Any:
        traced.append(batch.output_ids.shape)
        return (batch.logprobs * batch.output_mask).sum()

    for length in (1, 5, 64):
        output = list(range(1, length + 1))
        batch = rl.pad_results([result(0, [1], output)], [[1]], pad_id=0)
        assert float(total(batch)) == -sum(range(1, length + 1)) / 8
    assert traced == [(1, 64)]


@pytest.mark.parametrize("label", ["step-7", 2**40])
def test_versions_that_are_no_int32_are_kept_as_they_are(label: Any) -> None:
    """Each token has the caller's own label. The padding has None."""
    one = result(0, [1], [4, 5, 6], spans=[[0, 2, 3], [2, 3, label]])
    batch = rl.pad_results([one], [[1]], pad_id=0, max_output=4)
    assert batch.weight_versions.tolist() == [[3, 3, label, None]]


def test_numpys_prompts() -> None:
    """Prompts may be an array, as for `input_ids`."""
    prompts = np.array([[1, 2], [3, 4]])
    batch = rl.pad_results([result(1, [3, 4], [5])], prompts, pad_id=0, max_prompt=3)
    assert batch.prompt_ids.tolist() == [[0, 3, 4]]


def test_an_aborted_result_need_not_have_anything() -> None:
    """Its values may be missing or not finite, because the arrays do not have them."""
    one = result(0, [1], [4, 5], finish="abort")
    one["meta_info"]["output_token_logprobs"] = [(float("nan"), 4, None), (float("nan"), 5, None)]
    two = result(0, [1], [4, 5], finish="abort")
    del two["meta_info"]["output_token_logprobs"]
    batch = rl.pad_results([one, two], [[1]], pad_id=0, max_output=1)
    assert batch.aborted.all()
    assert not batch.output_mask.any()
    assert (batch.logprobs == 0).all()
    assert batch.prompt_mask.sum() == 2


def without(key: str) -> dict[str, Any]:
    made = result(0, [1, 2], [4, 5, 6])
    del made["meta_info"][key]
    return made


UNENDED = result(0, [1, 2], [4])
UNENDED["meta_info"]["finish_reason"] = None


@pytest.mark.parametrize(
    ("one", "options", "said"),
    [
        (without("output_token_logprobs"), {}, "result 0 has no log-prob.*return_logprob=True"),
        (
            result(0, [1, 2], [4, 5, 6]),
            {"max_output": 2},
            "prompt 0: .*output has 3 .*max_output=2",
        ),
        (result(0, [1, 2], [4]), {"max_prompt": 1}, "prompt 0: .*prompt has 2 .*max_prompt=1"),
        (result(0, [1, 2, 3], [4]), {}, r"prompt 0: expected the 3 ids .*\(2,\).*input_ids"),
        (result(1, [1, 2], [4]), {}, "prompt 1: .*belongs to none of the 1 prompts"),
        (UNENDED, {}, "prompt 0: .*a chunk of an unfinished output"),
        (result(0, [1, 2], [4]), {"max_output": 0}, "max_output=0: expected 1 or more"),
        (result(0, [1, 2], [4]), {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
    ],
)
def test_what_is_refused(one: dict[str, Any], options: dict[str, Any], said: str) -> None:
    """Nothing is truncated or guessed. The error has the prompt, the value, the limit and the
    remedy."""
    with pytest.raises(InvalidRequest, match=said):
        rl.pad_results([one], [[1, 2]], pad_id=0, **options)


def test_text_is_no_prompt() -> None:
    with pytest.raises(InvalidRequest, match="input_ids"):
        rl.pad_results([result(0, [1, 2], [4])], ["ab"], pad_id=0)


def test_importing_it_imports_no_jax() -> None:
    code = "import sys, enginepool.rl; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
