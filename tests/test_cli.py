"""The command line: what it reads, what it refuses, and one real run."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from enginepool.arguments import parse_devices, parse_server_args
from enginepool.cli import app
from enginepool.errors import InvalidConfig, InvalidRequest
from enginepool.prompt_lines import PromptLine, read_jsonl, read_text

# One program of each kind: the smallest engine that answers the toy's sums.
TINY = [
    *("--server-arg", "max_running_requests=2"),
    *("--server-arg", "max_total_tokens=256"),
    *("--server-arg", "max_prefill_tokens=64"),
    *("--server-arg", "chunked_prefill_size=64"),
    *("--server-arg", "precompile_token_paddings=[64]"),
    *("--server-arg", "precompile_bs_paddings=[2]"),
]


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def enginepool(*arguments, **options):
    """The command in a process of its own, under its own name."""
    program = "import sys; sys.argv[0] = 'enginepool'; from enginepool.cli import main; main()"
    options = {"capture_output": True, "text": True, "timeout": 240} | options
    return subprocess.run([sys.executable, "-c", program, *arguments], **options)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"]),
        *(["admin", "--help"], ["doctor", "--help"], ["demo", "--help"]),
        *(["reference", "--help"], ["reference", "swap", "--help"]),
    ],
    ids=" ".join,
)
def test_help_and_version_import_neither_jax_nor_upstream(arguments):
    program = """
import sys
from enginepool.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, sorted({"jax", "sgl_jax"} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == "0 []\n"
    assert "enginepool" in done.stdout or "Usage" in done.stdout


def test_version_is_the_packages():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"enginepool {importlib.metadata.version('enginepool')}\n"


def test_shell_completion_is_typers_own():
    """The script that a shell is given, and what it asks for when somebody presses tab."""
    script = enginepool(env=os.environ | {"_ENGINEPOOL_COMPLETE": "source_bash"})
    asked = {"_ENGINEPOOL_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    answer = enginepool(env=os.environ | asked | {"COMP_WORDS": "enginepool gen"})
    assert "_ENGINEPOOL_COMPLETE=complete_bash" in script.stdout
    assert answer.stdout.split() == ["generate"]
    assert "--install-completion" in invoke("--help").stdout


@pytest.mark.parametrize(
    ("text", "devices"), [(None, None), ("4", 4), ("0,2", [0, 2]), ("2,", [2]), (" 1, 3 ", [1, 3])]
)
def test_devices_are_a_count_or_ids(text, devices):
    assert parse_devices(text) == devices


def test_devices_that_are_neither_are_named():
    with pytest.raises(InvalidConfig, match="'0-3': expected a count such as 4"):
        parse_devices("0-3")


def test_server_args_are_json_or_strings():
    pairs = ["dtype=bfloat16", "page-size=16", "paddings=[1, 8]", "trust_remote_code=true", "a=b=c"]
    assert parse_server_args(pairs) == {
        "dtype": "bfloat16",
        "page_size": 16,
        "paddings": [1, 8],
        "trust_remote_code": True,
        "a": "b=c",
    }


@pytest.mark.parametrize(
    ("pair", "message"),
    [("page_size", "NAME=VALUE"), ("=3", "NAME=VALUE"), ("tp_size=2", "use --tp-size")],
)
def test_server_args_that_cannot_be_read_are_named(pair, message):
    with pytest.raises(InvalidConfig, match=message):
        parse_server_args([pair])


def test_text_has_one_prompt_a_line_and_no_empty_ones():
    lines = read_text(["12+7=\n", "\n", "  你是谁\r\n", "last"])
    assert [line.value for line in lines] == ["12+7=", "  你是谁", "last"]


def test_jsonl_has_text_ids_and_messages():
    rows = [
        {"prompt": "12+7="},
        {"input_ids": [1, 2], "sampling_params": {"n": 2}},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    assert read_jsonl([json.dumps(row) for row in rows], "here") == [
        PromptLine("prompt", "12+7="),
        PromptLine("input_ids", [1, 2], {"n": 2}),
        PromptLine("messages", [{"role": "user", "content": "hi"}]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", r"line 2: expected a JSON object, got \[1\]"),
        ("{}", "line 2: expected exactly one of prompt, input_ids, messages, got none"),
        ('{"prompt": "a", "input_ids": [1]}', "line 2: expected exactly one of"),
        ('{"prompt": "a", "n": 2}', "line 2: unknown field 'n'"),
        ('{"prompt": "a", "sampling_params": 3}', "line 2: sampling_params: expected an object"),
    ],
)
def test_jsonl_that_cannot_be_read_is_named_by_its_line(line, message):
    with pytest.raises(InvalidRequest, match=f"prompts.jsonl, {message}"):
        read_jsonl(['{"prompt": "fine"}', line], "prompts.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "enginepool: no prompts: the input is empty"),
        (["a", "--file", "b.txt"], "give prompts as arguments or with --file"),
        (["--file", "no-such-file.txt"], "No such file"),
        (["a", "--devices", "all"], "expected a count such as 4"),
        (["a", "--server-arg", "context_lenght=64"], "did you mean context_length?"),
        (["a", "--server-arg", "dp_size=2"], "every engine of a pool is its own replica"),
        (["a", "--tp-size", "0"], "expected a count of devices"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    result = invoke("generate", *arguments, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_unknown_option_is_named():
    result = invoke("generate", "a", "--temprature", "1")
    assert result.exit_code == 2
    assert "--temprature" in result.stderr


def test_prompt_that_fails_keeps_its_place_and_fails_the_command():
    result = invoke(
        *("generate", "12+7=", "--output", "jsonl", "--devices", "1", "--warmup", "none"),
        *("--timeout", "0.001", *TINY),
    )
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["meta_info"]["finish_reason"]["err_type"] == "timeout"
    assert "enginepool: prompt 0: " in result.stderr


def test_generate_answers_every_kind_of_line_in_input_order(tmp_path):
    """Two engines, in a process of their own: JSON alone on standard output, in input order."""
    from enginepool import toy

    rows = [
        {"prompt": "12+7="},
        {"messages": [{"role": "user", "content": "30+4="}]},
        {"input_ids": list(b"50+5=")},
        {"prompt": "12+7=", "sampling_params": {"max_new_tokens": 1}},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "enginepool.cli", "generate", "--file", file, "--devices", "2"),
            *("--model", toy.checkpoint("add"), "--output", "jsonl", "--return-logprob", *TINY),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["prompt_index"] for result in results] == [0, 1, 2, 3]
    assert [result["text"] for result in results] == ["19", "34", "55", "1"]
    for result in results:
        assert len(result["meta_info"]["output_token_logprobs"]) == len(result["output_ids"])
