"""A checkpoint's tokenizer gives the ids and the text that its own library gives."""

import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Fast
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from enginepool import EnginePool, InvalidConfig, InvalidRequest, toy
from enginepool.frontend.call_options import CallOptions, check_options
from enginepool.frontend.detokenizer import detokenize
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.model_config.tokenizer import check_tokenizer_class
from enginepool.toy.files import END_ID, END_TOKEN, START_ID, START_TOKEN, VOCAB_SIZE
from tests.support.checkpoints import set_json
from tests.support.inputs import input_processor
from tests.support.pools import SMALL

SPECIAL = ("<unk>", "<s>", "</s>")


@pytest.fixture(scope="module")
def bytes_beside() -> Any:
    """A tokenizer like Llama 2's: words begin with a space, other characters are bytes, and
    there is no pad token."""
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
    """The texts of a stream continue each other and have whole characters only, as early as
    possible. The last text is the tokenizer's own for prompt and output together."""
    processor = input_processor(bytes_beside)
    ids = bytes_beside(prompt + output)["input_ids"]
    prompt_ids = bytes_beside(prompt)["input_ids"]
    assert ids[: len(prompt_ids)] == prompt_ids
    request = processor.make_call(None, None, {"input_ids": prompt_ids}).requests[0]
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


@pytest.fixture
def begins() -> Any:
    """The toy's tokenizer with a begin token before every text, as Llama 3's has."""
    hf: Any = AutoTokenizer.from_pretrained(toy.checkpoint())
    hf.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START_TOKEN} $A", special_tokens=[(START_TOKEN, START_ID)]
    )
    hf.chat_template = START_TOKEN + "{{ messages[0]['content'] }}"
    return hf


def test_one_beginning(begins: Any) -> None:
    """A text gets one begin token. A template has its own. A rendered template can go without
    the tokenizer's."""
    processor = input_processor(begins)
    messages = [{"role": "user", "content": "1"}]
    rendered = begins.apply_chat_template(messages, tokenize=False)

    def ids(text: str, **options: Any) -> list[int]:
        return processor.make_call(text, {}, CallOptions(**options)).requests[0].input_ids

    once = [START_ID, ord("1")]
    assert ids("1") == once
    assert processor.tokenizer.apply_chat_template(0, messages) == once
    assert ids(rendered) == [START_ID, *once]
    assert ids(rendered, add_special_tokens=False) == once
    with pytest.raises(InvalidRequest, match="add_special_tokens='no'"):
        ids(rendered, add_special_tokens="no")
    with pytest.raises(InvalidRequest, match="input_ids get no tokens added"):
        processor.make_call(None, {}, {"input_ids": once, "add_special_tokens": False})


def test_the_option_is_of_calls_with_prompts() -> None:
    assert (
        check_options("generate", {"add_special_tokens": False}).get("add_special_tokens") is False
    )
    with pytest.raises(InvalidRequest, match="chat: add_special_tokens=False is unknown"):
        check_options("chat", {"add_special_tokens": False})


@pytest.mark.parametrize("special", [False, True])
def test_a_token_beyond_the_embedding(special: bool) -> None:
    """Such a token has no row in the embedding. It is refused in a text, in a conversation and
    as an id."""
    hf: Any = AutoTokenizer.from_pretrained(toy.checkpoint())
    hf.add_tokens([AddedToken("<added>", special=special)])
    processor = input_processor(hf)
    ids = processor.tokenizer.apply_chat_template(0, [{"role": "user", "content": "a <added>"}])
    for text, given in (("a <added> b", None), (None, [1, VOCAB_SIZE]), (None, ids)):
        with pytest.raises(InvalidRequest, match="token id 272 is outside the vocabulary of 272"):
            processor.make_call(text, {}, {"input_ids": given})
    assert processor.make_call("a b", {}, {}).requests


@pytest.fixture(scope="module")
def sums() -> Any:
    with EnginePool(devices=1, warmup="none", **SMALL) as pool:
        yield pool


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "text"),
    [(END_TOKEN, "19"), (f"9{END_TOKEN}", "1"), ([START_TOKEN, END_TOKEN], "19")],
)
def test_a_special_token_as_a_stop_string(sums: Any, stop: Any, text: str, skip: bool) -> None:
    """An output stops at the special token, whether the text shows special tokens or not. The
    text ends before it, also in a stream, or with it if it is to be kept and shown."""
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "stop": stop}
    params |= {"skip_special_tokens": skip}
    result = sums.generate("12+7=", params)
    assert result["text"] == text
    assert result["output_ids"] == [*b"19", END_ID]
    matched = END_TOKEN if isinstance(stop, list) else stop
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    *chunks, last = sums.stream("12+7=", params)
    assert last["text"] == text
    assert all(text.startswith(chunk["text"]) for chunk in chunks)
    kept = sums.generate("12+7=", params | {"no_stop_trim": True})
    assert kept["text"] == ("19" if skip else f"19{END_TOKEN}")


NAMED = [
    {"name": "default", "template": "D{{ messages[0]['content'] }}"},
    {"name": "tool_use", "template": "T{{ messages[0]['content'] }}"},
]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "D1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "T1"),
        ({"chat_template": "tool_use"}, "T1"),
    ],
)
def test_named_templates(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    processor = input_processor(loaded(tmp_path, chat_template=NAMED))
    messages = [{"role": "user", "content": "1"}]
    ids = processor.tokenizer.apply_chat_template(0, messages, **options)
    assert bytes(ids).decode() == text


@pytest.mark.parametrize("saved", [{}, {"tokenizer_class": "TokenizersBackend"}])
def test_named_templates_in_their_own_files(tmp_path: Path, saved: dict[str, Any]) -> None:
    """transformers now saves the default template beside a folder of the others."""
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (tmp_path / "chat_template.jinja").write_text(NAMED[0]["template"])
    (more / "tool_use.jinja").write_text(NAMED[1]["template"])
    processor = input_processor(loaded(tmp_path, chat_template=None, **saved))
    for tools, text in ((None, "D1"), ([{"type": "function", "function": {"name": "f"}}], "T1")):
        messages = [{"role": "user", "content": "1"}]
        ids = processor.tokenizer.apply_chat_template(0, messages, tools=tools)
        assert bytes(ids).decode() == text


@pytest.mark.parametrize(
    ("template", "why"),
    [(None, "no chat template"), ([NAMED[1]], r"no default specified.*\['tool_use'\]")],
)
def test_no_template(tmp_path: Path, template: Any, why: str) -> None:
    processor = input_processor(loaded(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match=why):
        processor.tokenizer.apply_chat_template(0, [{"role": "user", "content": "1"}])


def test_a_template_in_its_own_file(tmp_path: Path) -> None:
    """transformers 5 writes it like this."""
    (tmp_path / "chat_template.jinja").write_text("é{{ messages[0]['content'] }}", encoding="utf-8")
    processor = input_processor(loaded(tmp_path, chat_template=None))
    ids = processor.tokenizer.apply_chat_template(0, [{"role": "user", "content": "1"}])
    assert bytes(ids).decode() == "é1"


def loaded(folder: Path, **fields: Any) -> Any:
    """The toy's tokenizer with these fields in tokenizer_config.json, as engines load it."""
    shutil.copy(toy.checkpoint() / "tokenizer.json", folder)
    shutil.copy(toy.checkpoint() / "config.json", folder)
    shutil.copy(toy.checkpoint() / "tokenizer_config.json", folder)
    set_json(folder / "tokenizer_config.json", fields)
    args = SimpleNamespace(
        tokenizer_path=str(folder), tokenizer_mode="auto", trust_remote_code=False, revision=None
    )
    return Tokenizer.load(args).hf


@pytest.mark.parametrize("name", ["SentencePieceBackend", "MistralCommonBackend", 7])
def test_a_class_that_is_not_there(tmp_path: Path, name: Any) -> None:
    """The error names the class before anything is built."""
    for file in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(toy.checkpoint() / file, tmp_path)
    set_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    with pytest.raises(
        InvalidConfig, match=f"tokenizer_class={name!r} does not exist in transformers"
    ):
        EnginePool(str(tmp_path), devices=1, **SMALL).open()


@pytest.mark.parametrize(
    "name",
    [None, "TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer"],
)
def test_a_class_that_is_there(tmp_path: Path, name: Any) -> None:
    set_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    check_tokenizer_class(str(tmp_path), None, trust_remote_code=False)
