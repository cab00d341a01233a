"""Conversations: text as a string or in parts, for any checkpoint's template."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from enginepool import EnginePool, InvalidRequest, toy
from enginepool.frontend.tokenizer import Tokenizer
from tests.support.templates import TEMPLATES, rendered


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(toy.checkpoint()))


@pytest.fixture
def chatting(make_pool: Any) -> Iterator[EnginePool]:
    """One engine. Its tokenizer's template is put back afterwards."""
    pool = make_pool("toy", 1, max_queued=2, when_full="raise", stream_interval=2)
    hf = pool.engines[0].tokenizer_manager.tokenizer
    own = hf.chat_template
    yield pool
    hf.chat_template = own


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_parts_are_the_text(tokenizer: Tokenizer, template: str) -> None:
    """A string and a single part with that text give the same ids, in every role."""
    tokenizer.hf.chat_template = TEMPLATES[template]
    turns = [("system", "be short"), ("user", "12+7="), ("assistant", "19"), ("user", "1+1=")]
    expected = tokenizer.hf(rendered(*turns), add_special_tokens=False)["input_ids"]
    for content in (str, parts):
        messages = [{"role": role, "content": content(text)} for role, text in turns]
        assert tokenizer.apply_chat_template(0, messages) == expected


@pytest.mark.parametrize(
    ("template", "text"),
    [("adds strings", "12 +7="), ("strings or parts", "12+7="), ("parts", "12+7=")],
)
def test_several_parts(tokenizer: Tokenizer, template: str, text: str) -> None:
    """A template that takes parts joins them itself. For others they are joined by a space."""
    tokenizer.hf.chat_template = TEMPLATES[template]
    messages = [{"role": "user", "content": parts("12", "+7=")}]
    expected = tokenizer.hf(rendered(("user", text)), add_special_tokens=False)["input_ids"]
    assert tokenizer.apply_chat_template(0, messages) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_pool_chat_takes_parts(chatting: EnginePool, template: str) -> None:
    chatting.engines[0].tokenizer_manager.tokenizer.chat_template = TEMPLATES[template]
    answers = [
        chatting.chat([{"role": "user", "content": content}], {"temperature": 0})
        for content in ("12+7=", parts("12+7="))
    ]
    assert [answer["text"] for answer in answers if isinstance(answer, dict)] == ["19", "19"]


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "'image_url'"),
        ({"type": "text"}, "'text'"),
        ({"text": "12+7="}, "12\\+7="),
        ("12+7=", "12\\+7="),
    ],
)
def test_other_parts_are_refused(chatting: EnginePool, part: Any, named: str) -> None:
    messages = [{"role": "user", "content": [*parts("see"), part]}]
    with pytest.raises(InvalidRequest, match=rf"messages\[0\].*text only.*{named}"):
        chatting.chat(messages)


def test_a_template_of_the_hosts_own(chatting: EnginePool) -> None:
    """The host's code may pass its own template. Arguments that change the type of the result
    are refused."""
    messages = [{"role": "user", "content": parts("12+7=")}]
    template = "{{ messages[0]['content'] }}"
    answer = chatting.chat(
        messages, {"temperature": 0}, chat_template_kwargs={"chat_template": template}
    )
    assert isinstance(answer, dict)
    assert (answer["text"], answer["meta_info"]["prompt_tokens"]) == ("19", 5)
    for name in ("return_tensors", "tokenize"):
        with pytest.raises(InvalidRequest, match=f"the pool sets {name} itself"):
            chatting.chat(messages, chat_template_kwargs={name: "np"})
