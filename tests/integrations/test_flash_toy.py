"""The toy on the TPU's attention kernel."""

from enginepool import toy
from tests.integrations.conftest import OpenFlash
from tests.support.forced import assert_greedy


def test_the_toy_answers_as_the_reference(open_flash: OpenFlash):
    """Sums, one query head a key head, a prompt alone and batches."""
    texts = [f"{a}+{b}=" for a, b in ((12, 7), (30, 4), (5, 9), (88, 1), (41, 50), (3, 33))]
    with open_flash(toy.checkpoint()) as pool:
        alone = pool.generate(texts[0], {"temperature": 0, "max_new_tokens": 5})
        results = pool.generate_all(
            texts, {"temperature": 0, "max_new_tokens": 5}, return_logprob=True
        )
    assert [r["text"] for r in (alone, *results)] == ["19", "19", "34", "14", "89", "91", "36"]
    assert_greedy(toy.checkpoint(), [list(text.encode()) for text in texts], results)
