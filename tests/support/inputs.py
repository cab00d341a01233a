"""Makes the input processor of a pool, without a pool."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from enginepool import toy
from enginepool.frontend.generation_defaults import GenerationDefaults
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.input_processor import InputProcessor
from enginepool.frontend.limits import Limits
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.lora.adapter import Adapters
from enginepool.toy.files import END_ID, VOCAB_SIZE


def input_processor(
    hf: Any = None, folder: Path | None = None, preferred: str | None = None
) -> InputProcessor:
    """
    Args:
        hf: A Hugging Face tokenizer; the toy's if left out.
        folder: Of a checkpoint whose generation_config.json applies; none if left out.
        preferred: `preferred_sampling_params`.
    """
    tokenizer = Tokenizer(hf or AutoTokenizer.from_pretrained(toy.checkpoint()))
    limits = Limits(
        prompt=400, total=500, vocab_size=VOCAB_SIZE, origin="a test", scored=500,
        score_refusal=None, routing=None, end_ids=frozenset({END_ID}),
    )  # fmt: skip
    if folder is None:
        defaults = GenerationDefaults.of({}, {})
    else:
        defaults = GenerationDefaults.read(str(folder), preferred=preferred)
    grammars = GrammarCompiler(tokenizer, VOCAB_SIZE, {}, "a test")
    return InputProcessor(tokenizer, limits, defaults, grammars, Adapters())
