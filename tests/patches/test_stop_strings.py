"""Stop strings in a text that comes token by token, in upstream's own request."""

import random
import types

import pytest

import patches
from benchmarks.merges import give_merges
from patches import stop_strings

ALPHABET = [*b"abefg th", 0x80, 0xE2, *"é谁🙂".encode(), 256, 257, *range(259, 270)]
STOPS = ["efg", "a谁", "the", "🙂", "é", " a", "bb", "<|im_start|>a"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    from scripts.train_toy.checkpoint import write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(give_merges(folder, ["efg", "谁🙂", "th"], 259))


def ended(tokenizer, ids, stops, max_new_tokens=1000, **params):
    """After how many of these ids a request ends by a stop string, if it is checked after each."""
    from patches._lookup import module

    sampling = module("sgl_jax.srt.sampling.sampling_params").SamplingParams(
        stop=stops, max_new_tokens=max_new_tokens, ignore_eos=True, **params
    )
    sampling.normalize(tokenizer)
    request = module("sgl_jax.srt.managers.schedule_batch").Req
    req = types.SimpleNamespace(
        sampling_params=sampling,
        tokenizer=tokenizer,
        origin_input_ids=[97],
        output_ids=[],
        finished_reason=None,
        to_finish=None,
        grammar=None,
        eos_token_ids=None,
        vocab_size=272,
        decoded_text="",
    )
    for name in dir(request):
        if name.startswith(("_check", "check")):
            setattr(req, name, types.MethodType(getattr(request, name), req))
    req.finished = lambda: req.finished_reason is not None
    for count, token in enumerate(ids, 1):
        req.output_ids.append(token)
        req.check_finished()
        if req.finished():
            return count, req.finished_reason.to_json()["type"]
    return None


def expected(tokenizer, ids, stops, skip_special_tokens):
    """The same, by decoding the whole text after each id."""
    for count in range(1, len(ids) + 1):
        for skip in {False, skip_special_tokens}:
            text = tokenizer.decode(ids[:count], skip_special_tokens=skip).rstrip("\ufffd")
            if any(stop in text for stop in stops):
                return count, "stop"
    return None


def test_upstream_misses_some(tokenizer):
    assert ended(tokenizer, list(b"abefg"), ["efg"]) is None
    assert ended(tokenizer, list(b"ab"), ["b"], max_new_tokens=2) == (2, "length")


@pytest.mark.parametrize("skip", [True, False])
def test_no_stop_string_is_missed(tokenizer, skip):
    """2,000 texts of letters, broken characters, special tokens and merged tokens."""
    patches.apply([stop_strings.PATCH])
    draw, found = random.Random(int(skip)), 0
    for _ in range(2000):
        ids = draw.choices(ALPHABET, k=draw.randint(1, 30))
        stops = draw.sample(STOPS, draw.randint(1, 3))
        wanted = expected(tokenizer, ids, stops, skip)
        assert ended(tokenizer, ids, stops, skip_special_tokens=skip) == wanted, (ids, stops)
        found += wanted is not None
    assert found > 300


def test_the_last_token_that_is_allowed(tokenizer):
    patches.apply([stop_strings.PATCH])
    assert ended(tokenizer, list(b"abefg"), ["efg"], max_new_tokens=5) == (5, "stop")
    assert ended(tokenizer, list(b"abefg"), ["efg"], max_new_tokens=4) == (4, "length")
