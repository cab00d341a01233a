"""The command line: what it reads, what it refuses, and one real run."""

import importlib.metadata
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from enginepool.cli.arguments import parse_devices, parse_server_args
from enginepool.cli.main import app
from enginepool.cli.prompt_file import Format, PromptLine, decode, read_jsonl, read_text
from enginepool.cli.result_lines import ResultLines
from enginepool.errors import InvalidConfig, InvalidRequest
from enginepool.frontend.progress_bar import progress_bar
from tests.support.pools import SMALL
from tests.support.templates import TEMPLATES

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


# The command in a process of its own, under its own name.
PROGRAM = "import sys; sys.argv[0] = 'enginepool'; from enginepool.cli.main import main; main()"
COMMAND = [sys.executable, "-c", PROGRAM]


def enginepool(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 240} | options
    return subprocess.run([*COMMAND, *arguments], **options)


LAST_WORDS = """
import atexit, logging, sys, weakref
import typer
from enginepool.cli.main import app, main

class Held:
    pass

class Buffered(logging.Handler):
    def flush(self):
        print("logged")

@app.command()
def said():
    held["it"] = Held()
    weakref.finalize(held["it"], print, "held")
    atexit.register(print, "registered")
    raise typer.Exit(3)

held, handler = {}, Buffered()
sys.argv = ["enginepool", "said"]
main()
"""


def test_nothing_that_waits_for_the_exit_is_left_out():
    """Exit callbacks run although the interpreter skips taking JAX down, which takes seconds."""
    command = [sys.executable, "-c", LAST_WORDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout.split() == ["registered", "held", "logged"]


def redirected(redirections, *arguments):
    """The command as a shell starts it, with `redirections`."""
    line = f"{shlex.join([*COMMAND, *arguments])} {redirections}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=240)


def test_help_and_version_import_neither_jax_nor_upstream():
    """All commands run in one process, because each Python takes longer to start than they take."""
    asked = [
        *(["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"]),
        *(["admin", "--help"], ["doctor", "--help"], ["demo", "--help"]),
        *(["plan", "--help"], ["reference", "--help"], ["reference", "swap", "--help"]),
    ]
    program = """
import json, sys
from enginepool.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print(end.code, sorted({"jax", "sgl_jax"} & sys.modules.keys()), file=sys.stderr)
    print("\\f", end="", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stderr == "0 []\n" * len(asked)
    *answers, rest = done.stdout.split("\f")
    assert rest == ""
    for arguments, said in zip(asked, answers, strict=True):
        assert "enginepool" in said or "Usage" in said, arguments


def test_version_is_the_packages():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"enginepool {importlib.metadata.version('enginepool')}\n"


def test_shell_completion_is_typers_own():
    """The script for a shell, and what the shell asks for when somebody presses tab."""
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


@pytest.mark.parametrize(
    ("command", "pair", "hint"),
    [
        (["generate", "a"], "warmup=none", "use --warmup"),
        (["doctor"], "devices=2", "use --devices"),
        (["doctor"], "warmup=none", "this command has no --warmup"),
        (["plan", "--model", "a", "--topology", "v5e-8"], "tp-size=2", "use --tp-size"),
        (["plan", "--model", "a", "--topology", "v5e-8"], "devices=2", "has no --devices"),
        (["reference", "swap"], "warmup=none", "this command has no --warmup"),
    ],
)
def test_an_option_of_the_pool_among_server_args(command, pair, hint):
    """The error names the command's own option, or says that it has none."""
    result = invoke(*command, "--server-arg", pair)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"{hint}\n")


def test_every_option_of_the_server_is_explained():
    """docs/operating.md says that `enginepool serve --help` explains them."""
    serve = typer.main.get_command(app).commands["serve"]
    assert [option.name for option in serve.params if not getattr(option, "help", None)] == []


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
        (["a", "--server-arg", "dp_size=2"], "each engine of a pool is a replica"),
        (["a", "--tp-size", "0"], "expected a count of devices"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    result = invoke("generate", *arguments, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("redirections", "message"),
    [
        ("<&-", "no prompts: standard input is closed; give them"),
        ("0>/dev/null", "standard input: Bad file descriptor"),
    ],
)
def test_input_that_cannot_be_read_is_one_clear_line(redirections, message):
    done = redirected(redirections, "generate")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"enginepool: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["generate", "12+7="], ["--version"], ["--help"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("redirections", "message"),
    [(">&-", "it is closed"), (">/dev/full", "No space left on device")],
)
def test_output_that_cannot_be_written_is_one_clear_line(arguments, redirections, message):
    """The error comes before engines start, where it can be seen then. No model exists here."""
    arguments = [*arguments, "--model", "no-such-model"] if "generate" in arguments else arguments
    done = redirected(redirections, *arguments)
    assert done.stderr == f"enginepool: standard output: {message}\n"
    assert done.returncode == 1


def test_errors_do_not_go_to_standard_output_where_standard_error_is_closed():
    done = redirected("2>&-", "generate", "a", "--devices", "all")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_prompts_that_are_not_utf8_are_named_by_their_line(tmp_path, form, by_file):
    prompts = b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n'
    file = tmp_path / "prompts"
    file.write_bytes(prompts)
    result = invoke(
        *("generate", "--input", form, *(["--file", str(file)] if by_file else [])),
        stdin=b"" if by_file else prompts,
    )
    assert (result.exit_code, result.stdout) == (2, "")
    source = file if by_file else "standard input"
    assert result.stderr.startswith(f"enginepool: {source}, line 2: 'utf-8' codec can't decode")
    assert result.stderr.count("\n") == 1


def test_mark_at_the_beginning_of_a_file_is_no_part_of_the_first_prompt():
    assert list(decode([b"\xef\xbb\xbf12+7=\n", b"30+4="], "here")) == ["12+7=\n", "30+4="]


def ended(prompt_index, sample_index, text):
    meta = {"prompt_index": prompt_index, "sample_index": sample_index, "completion_tokens": 1}
    return {"text": text, "meta_info": meta}


def test_text_is_written_in_input_order_and_as_soon_as_its_turn_comes():
    stream = io.BytesIO()
    lines = ResultLines(stream, Format.TEXT, [2, 1, 1])
    for result, written in [
        (ended(0, 1, "b"), ""),
        (ended(0, 0, "a"), "a\nb\n"),
        (ended(2, 0, "你"), "a\nb\n"),
    ]:
        lines.add(result)
        assert stream.getvalue().decode() == written
    lines.rest()
    assert stream.getvalue().decode() == "a\nb\n你\n"


def test_json_is_written_as_results_end():
    stream = io.BytesIO()
    lines = ResultLines(stream, Format.JSONL, [1, 1])
    lines.add(ended(1, 0, "你"))
    assert json.loads(stream.getvalue()) == {"prompt_index": 1, **ended(1, 0, "你")}


def test_progress_bar_leaves_standard_output_alone(capsys, monkeypatch):
    """Standard error is a terminal, and standard output goes to a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar(2, lambda: (1, 10), wanted=True) as tick:
        print("12+7=19")
        tick()
    out, err = capsys.readouterr()
    assert out == "12+7=19\n"
    assert "1/2" in err


def test_unknown_option_is_named():
    result = invoke("generate", "a", "--temprature", "1")
    assert result.exit_code == 2
    assert "--temprature" in result.stderr


def test_prompt_that_fails_keeps_its_place_and_fails_the_command():
    # Shapes of other tests, for which programs are compiled.
    known = [arg for pair in SMALL.items() for arg in ("--server-arg", "{}={}".format(*pair))]
    result = invoke(
        *("generate", "12+7=", "--output", "jsonl", "--devices", "1", "--warmup", "none"),
        *("--timeout", "0.001", *known),
    )
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["meta_info"]["finish_reason"]["err_type"] == "timeout"
    assert "enginepool: prompt 0: " in result.stderr


@pytest.mark.parametrize("template", ["drops lists", "parts"])
def test_messages_as_the_template_takes_them(tmp_path, template):
    """As in Python and over HTTP: content is a string or text parts."""
    content = ["12+7=", [{"type": "text", "text": "12+7="}]]
    rows = [{"messages": [{"role": "user", "content": each}]} for each in content]
    result = generate_rows(tmp_path, template, rows)
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["19", "19"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": []}, "the conversation is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
            "messages[0]: a pool takes text only",
        ),
        ({"prompt": "\ud800"}, "the tokenizer does not take"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path, row, why):
    """The error names the line's prompt."""
    result = generate_rows(tmp_path, "trims", [{"input_ids": [49]}, row])
    assert result.exit_code == 2
    assert f"prompt 1: {why}" in " ".join(result.stderr.split())


def generate_rows(directory, template, rows):
    """`generate` in this process, with the toy and another chat template."""
    from enginepool import toy

    model = directory / "toy"
    shutil.copytree(toy.checkpoint(), model)
    (model / "chat_template.jinja").write_text(TEMPLATES[template])
    known = [arg for pair in SMALL.items() for arg in ("--server-arg", "{}={}".format(*pair))]
    return invoke(
        *("generate", "--input", "jsonl", "--output", "jsonl", "--model", str(model)),
        *("--devices", "1", "--temperature", "0", *known),
        stdin="\n".join(map(json.dumps, rows)),
    )


@pytest.mark.slow
def test_generate_answers_every_kind_of_line(tmp_path):
    """Two engines in a process of their own. Standard output has JSON only."""
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
            *(
                sys.executable,
                "-m",
                "enginepool.cli.main",
                "generate",
                "--file",
                file,
                "--devices",
                "2",
            ),
            *("--model", toy.checkpoint("add"), "--output", "jsonl", "--return-logprob", *TINY),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = sorted(map(json.loads, done.stdout.splitlines()), key=lambda r: r["prompt_index"])
    assert [result["prompt_index"] for result in results] == [0, 1, 2, 3]
    assert [result["text"] for result in results] == ["19", "34", "55", "1"]
    for result in results:
        assert len(result["meta_info"]["output_token_logprobs"]) == len(result["output_ids"])


@pytest.mark.slow
def test_sampling_defaults_are_pythons_and_json_comes_as_it_ends(tmp_path, make_pool):
    """The toy's generation_config.json is greedy and ends after 16 tokens. A call with any
    parameter has upstream's defaults instead, which end after 128."""
    rows = [
        {"prompt": "12+7=", "sampling_params": {"ignore_eos": True, "top_k": 1}},
        {"prompt": "30+4="},
    ]
    done = enginepool(
        *("generate", "--input", "jsonl", "--output", "jsonl", "--devices", "1", *TINY),
        input="\n".join(map(json.dumps, rows)),
    )
    assert done.returncode == 0, done.stderr
    long, short = make_pool("toy", 1).generate_all(
        [row["prompt"] for row in rows], [row.get("sampling_params") for row in rows]
    )
    assert len(long["output_ids"]) == 128
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(result["prompt_index"], result["output_ids"]) for result in results] == [
        (1, short["output_ids"]),
        (0, long["output_ids"]),
    ]


def start_many(output):
    """200 prompts that end one after the other, in a process of their own."""
    # Greedy, because a sampled output may have line breaks after the sum.
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 100}
    row = {"prompt": "12+7=", "sampling_params": params}
    process = subprocess.Popen(
        [
            *(*COMMAND, "generate", "--input", "jsonl", "--output", output),
            *("--devices", "1", "--warmup", "none", *TINY),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write("\n".join([json.dumps(row)] * 200))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.slow
@pytest.mark.parametrize("output", ["jsonl", "text"])
def test_interrupt_leaves_what_has_ended(output):
    """Ctrl-C after the third result."""
    process = start_many(output)
    first = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    # Not `communicate`, which would lose what `readline` has read ahead.
    rest, said = process.stdout.read(), process.stderr.read()
    assert process.wait(timeout=120) == 130, said
    lines = [*first, *rest.splitlines()]
    assert 3 <= len(lines) < 200
    if output == "jsonl":
        assert len({json.loads(line)["prompt_index"] for line in lines}) == len(lines)
    assert said == (
        f"enginepool: interrupted: {len(lines)} of 200 outputs had ended and are written\n"
    )


@pytest.mark.slow
def test_reader_that_leaves_ends_the_command_quietly():
    """As with `head -1`. The exit code is that of a program that SIGPIPE ended."""
    process = start_many("jsonl")
    assert json.loads(process.stdout.readline())
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 141
