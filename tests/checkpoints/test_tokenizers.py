"""Tokenizers as checkpoints have them: ids and text are what the tokenizer's own library says."""

from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from enginepool.requests.detokenizer import detokenize
from tests.support.inputs import input_processor

SPECIAL = ("<unk>", "<s>", "</s>")


@pytest.fixture(scope="module")
def bytes_beside() -> Any:
    """As Llama 2's is: words with their space before, a byte where there is none; no pad token."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", "▁a", "ab"]
    vocabulary = {name: index for index, name in enumerate(names)}
    fast: Any = Fast(
        models.BPE(
            vocab=vocabulary, merges=[("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>"
        )
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence(steps)  # type: ignore[arg-type]
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("prompt", ["a", "你", "🙂🙂", "b ሰላም", "a b a b a b"])
@pytest.mark.parametrize("output", ["你好", " ab 你 b", "🙂🙂a", "ሰላም b", "é"])
def test_characters_of_several_tokens(bytes_beside: Any, prompt: str, output: str) -> None:
    """A stream's texts continue each other, have whole characters only, and as soon as they are;
    the last one is what the tokenizer says of prompt and output together."""
    processor = input_processor(bytes_beside)
    ids = bytes_beside(prompt + output)["input_ids"]
    prompt_ids = bytes_beside(prompt)["input_ids"]
    assert ids[: len(prompt_ids)] == prompt_ids
    request = processor.make_call(None, None, prompt_ids).requests[0]
    output_ids = ids[len(prompt_ids) :]
    texts = [
        detokenize(request, output_ids[:count], processor.tokenizer, final=False)
        for count in range(len(output_ids) + 1)
    ]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == output
    ends = [place for place, character in enumerate(output, 1) if not character.isascii()]
    assert {output[:end] for end in ends} <= {*texts}
    assert detokenize(request, output_ids, processor.tokenizer) == output
