"""A checkpoint says which ids end an output, and which sampling parameters a call without any
has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidRequest, toy
from enginepool.toy.files import END_ID, read_checkpoint
from tests.support.checkpoints import set_config, set_json, write_tensors
from tests.support.forced import write_scripted_model
from tests.support.inputs import input_processor
from tests.support.pools import SMALL
from tests.support.servers import Running, generate, serving

GENERATION = "generation_config.json"


def generation(folder: Path, fields: Any) -> Path:
    """A folder whose generation_config.json has these fields or this text."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (folder / GENERATION).write_text(text, encoding="utf-8")
    return folder


def default_params(folder: Path, preferred: str | None = None) -> Any:
    """Upstream's SamplingParams of a call without parameters."""
    processor = input_processor(folder=folder, preferred=preferred)
    return processor.make_call("12+7=", None, {}).requests[0].sampling


ALL = 1 << 30


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0, "top_k": ALL, "top_p": 1.0, "max_new_tokens": 128}),
        ({"top_k": 0}, {"top_k": ALL}),
        ({"top_k": -1}, {"top_k": ALL}),
        ({"top_k": 50}, {"top_k": 50}),  # transformers' own default, and still the checkpoint's
        ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}),  # upstream's greedy
        ({"do_sample": False}, {"top_k": 1}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"top_k": 1}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7, "top_k": ALL}),
        ({"temperature": None, "top_k": None, "top_p": None}, {"temperature": 1.0, "top_k": ALL}),
        ({"max_new_tokens": 2000}, {"max_new_tokens": 495}),  # as much as fits
        ({"max_new_tokens": 7, "min_new_tokens": 3}, {"max_new_tokens": 7, "min_new_tokens": 3}),
        ({"max_length": 20}, {"max_new_tokens": 128}),
        ({"stop_strings": ["\n"]}, {"stop_strs": ["\n"]}),
        ({"pad_token_id": 0, "bos_token_id": [1, 2], "eos_token_id": None}, {"top_k": ALL}),
        ({"repetition_penalty": 1.0, "num_beams": 1, "bad_words_ids": None}, {"top_k": ALL}),
        ({"chat_format": "chatml", "max_window_size": 24000}, {"top_k": ALL}),
    ],
)
def test_fields_mean_what_transformers_means(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = default_params(generation(tmp_path, fields))
    assert {name: getattr(made, name) for name in expected} == expected


def test_a_checkpoint_without_the_file(tmp_path: Path) -> None:
    assert default_params(tmp_path).max_new_tokens == 128


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 1.05}, r"repetition_penalty=1\.05: sglang-jax does not compute it"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
        ({"suppress_tokens": [5]}, r"suppress_tokens=\[5\]"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"temperature": "hot"}, "temperature='hot'.*a number"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 7}, "top_p=7"),
        ({"top_k": 2.5}, r"top_k=2\.5"),
        ({"min_new_tokens": 200}, "min_new_tokens"),
    ],
)
def test_impossible_defaults_are_refused_by_the_call(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    """The call that needs the value is refused. The error says where the value is from and what
    to do."""
    with pytest.raises(InvalidRequest, match=rf"{GENERATION} do not work.*{named}") as raised:
        default_params(generation(tmp_path, fields))
    assert "pass sampling_params to the call" in str(raised.value)


def test_preferred_sampling_params_come_first(tmp_path: Path) -> None:
    """They also replace values in the file that engines do not support."""
    folder = generation(tmp_path, {"repetition_penalty": 1.05, "top_k": 9, "temperature": 0.5})
    preferred = '{"repetition_penalty": 1.0, "temperature": 0.7, "stop": ["."]}'
    made = default_params(folder, preferred)
    assert (made.temperature, made.top_k, made.stop_strs) == (0.7, 9, ["."])
    with pytest.raises(InvalidRequest, match=r"unknown sampling parameter heat"):
        default_params(folder, '{"repetition_penalty": 1.0, "heat": 3}')
    for text in ("{", "[]"):
        with pytest.raises(InvalidConfig, match="preferred_sampling_params="):
            default_params(folder, text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object"),
        ({"max_new_tokens": 0}, "must be greater than 0"),
        ({"max_new_tokens": "7"}, "cannot be read"),
        ({"pad_token_id": [1]}, "cannot be read"),
        ({"eos_token_id": "258"}, "eos_token_id='258': expected a token id or a list"),
        ({"eos_token_id": [258, None]}, "expected a token id or a list"),
    ],
)
def test_a_file_that_cannot_be_read_opens_nothing(tmp_path: Path, fields: Any, why: str) -> None:
    """Upstream treats such a file as missing, and loses its end ids, or fails without naming it."""
    folder = generation(tmp_path, fields)
    set_config(folder, json.loads((toy.checkpoint() / "config.json").read_text()))
    with pytest.raises(InvalidConfig, match=rf"{GENERATION}.*{why}"):
        EnginePool(str(folder), devices=1, **SMALL).open()


@pytest.mark.parametrize("ends", ["258", [[258]], True, 2.0])
def test_ends_of_config_json_that_are_no_ids(tmp_path: Path, ends: Any) -> None:
    set_config(tmp_path, json.loads((toy.checkpoint() / "config.json").read_text()))
    set_config(tmp_path, {"eos_token_id": ends})
    with pytest.raises(InvalidConfig, match=r"config\.json: eos_token_id=.*a list of them"):
        EnginePool(str(tmp_path), devices=1, **SMALL).open()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """One engine on the scripted model. config.json ends it with 0, which follows `m`,
    generation_config.json with `5` or the first byte of `你`, and the tokenizer with END_ID.
    transformers 5 saves Llama's end ids like this."""
    folder = write_scripted_model(tmp_path_factory.mktemp("ended"))
    _, tensors = read_checkpoint(folder)
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    head[0], head[ord("n")] = embedding[ord("m")], np.zeros_like(head[0])
    write_tensors(folder, tensors)
    set_config(folder, {"eos_token_id": 0})
    saved = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    set_json(folder / "tokenizer_config.json", saved, without=("additional_special_tokens",))
    generation(folder, {"eos_token_id": [ord("5"), "你".encode()[0]], "top_k": 0, "max_length": 9,
                        "do_sample": False, "transformers_version": "4.57.6"})  # fmt: skip
    with EnginePool(str(folder), devices=1, warmup="none", **SMALL) as pool:
        yield pool


ENDS = [("1", "234", ord("5")), ("k", "lm", 0), ("x", "yz", END_ID), ("z", "", END_ID)]


@pytest.mark.parametrize(("prompt", "text", "end"), ENDS)
def test_every_end_ends(ended: EnginePool, prompt: str, text: str, end: int) -> None:
    """A call without sampling parameters ends at each end id, whichever file names it."""
    result: Any = ended.generate(prompt)
    assert (result["text"], result["output_ids"][-1]) == (text, end)
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


@pytest.fixture(scope="module")
def server(ended: EnginePool) -> Iterator[Running]:
    with serving(ended) as running:
        yield running


@pytest.mark.parametrize(("prompt", "text", "end"), ENDS)
def test_every_end_ends_a_clients_output(server: Running, prompt: str, text: str, end: int) -> None:
    """The same holds for /generate without parameters, completions and chats."""
    with server.http() as http:
        plain = http.post("/generate", json={"text": prompt}).json()
        assert plain["text"] == text
        assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
        assert generate(http, prompt)["text"] == text
    client = server.openai()
    completed = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=30)
    assert (completed.choices[0].text, completed.choices[0].finish_reason) == (text, "stop")
    turns: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": prompt}]
    answer = client.chat.completions.create(
        model="m", messages=turns, temperature=0, max_tokens=30,
        extra_body={"continue_final_message": True},
    ).choices[0]  # fmt: skip
    assert (answer.message.content or "", answer.finish_reason) == (text, "stop")
