"""The command line: `enginepool generate`, `serve`, `admin`, `doctor`, `demo` and `reference`.

Whatever imports sgl_jax is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.arguments import make_arguments
from enginepool.complaints import clear_errors, complain
from enginepool.errors import InvalidRequest
from enginepool.options import Devices, Dtype, Model, ServerArg, TpSize, Warmup, WarmupOption
from enginepool.prompt_lines import PromptLine, read_jsonl, read_text
from enginepool.reference.commands import app as reference
from enginepool.serve.command import SERVE_CONTEXT, admin, serve

if TYPE_CHECKING:
    from enginepool.pool import EnginePool

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=SERVE_CONTEXT)(serve)
app.add_typer(admin, name="admin")
app.add_typer(reference, name="reference")


class Format(StrEnum):
    """How prompts come in and results go out."""

    TEXT = "text"
    JSONL = "jsonl"


def main() -> None:
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print("enginepool", importlib.metadata.version("enginepool"))
        raise typer.Exit()


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """One sglang-jax engine on each accelerator device of a host, used as one."""


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts, one a line; a name in .jsonl means JSON objects."),
    ] = None,
    input_format: Annotated[
        Format | None, typer.Option("--input", help="What the file or standard input holds.")
    ] = None,
    output: Annotated[
        Format, typer.Option(help="Text alone, or the whole result as JSON.")
    ] = Format.TEXT,
    model: Model = None,
    devices: Devices = None,
    tp_size: TpSize = 1,
    warmup: WarmupOption = Warmup.SEQUENTIAL,
    dtype: Dtype = None,
    max_new_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    n: Annotated[int | None, typer.Option(help="Samples of each prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same samples.")] = None,
    return_logprob: Annotated[
        bool, typer.Option("--return-logprob", help="Log-probabilities in the JSON.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds for all prompts.")] = None,
    server_arg: ServerArg = None,
) -> None:
    """Generate for every prompt, on all engines; results in input order on standard output.

    Prompts come from the arguments, --file, or standard input. A line of JSON has "prompt",
    "input_ids" or "messages", and may have "sampling_params". Sampling options that are not given
    are the checkpoint's own.
    """
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "n": n,
        "sampling_seed": seed,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    with clear_errors():
        lines = _read(prompts or [], file, input_format)
        arguments = make_arguments(devices, tp_size, dtype, server_arg)
        arguments["warmup"] = str(warmup)
        from enginepool.pool import EnginePool

        with EnginePool(model, **arguments) as pool:
            results = _generate(pool, lines, chosen, return_logprob=return_logprob, timeout=timeout)
    _write(results, output)
    failed = [r["meta_info"] for r in results if r["meta_info"]["finish_reason"]["type"] == "abort"]
    for meta in failed:
        complain(f"prompt {meta['prompt_index']}: {meta['finish_reason'].get('message')}")
    if failed:
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that JAX may take to start.")] = 60.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Open a pool, and see what its steps cost the host.")
    ] = False,
    model: Model = None,
    devices: Devices = None,
    tp_size: TpSize = 1,
    dtype: Dtype = None,
    server_arg: ServerArg = None,
) -> None:
    """Look at what engines need: devices and who holds them, versions, patches, environment.

    With --profile: where a step's time goes for the model and options given, and how many engines
    one process can feed.
    """
    if profile:
        with clear_errors():
            _profile(model, make_arguments(devices, tp_size, dtype, server_arg), as_json)
        return
    from enginepool.doctor import examine, show

    report = examine(timeout)
    print(json.dumps(report, indent=2)) if as_json else show(report)
    raise typer.Exit(1 if report["problems"] else 0)


@app.command()
def demo(
    engines: Annotated[int, typer.Option(min=1, help="Engines, one a device.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="How many sums to ask for.")] = 64,
) -> None:
    """Watch engines come up and answer sums side by side, with the toy model."""
    from enginepool.demo import run

    with clear_errors():
        run(engines, prompts)


def _profile(model: str | None, arguments: dict[str, Any], as_json: bool) -> None:
    from enginepool.pool import EnginePool
    from enginepool.profiling import profile, show_profile

    with EnginePool(model, **arguments) as pool:
        args: Any = pool.engines[0].server_args
        report = profile(pool, requests=min(args.max_running_requests or 8, 8), tokens=64)
    print(json.dumps(report, indent=2)) if as_json else show_profile(report)


def _read(prompts: list[str], file: Path | None, form: Format | None) -> list[PromptLine]:
    if prompts and file is not None:
        raise InvalidRequest("give prompts as arguments or with --file, and not both")
    if prompts:
        return [PromptLine("prompt", text) for text in prompts]
    if file is None and sys.stdin.isatty():
        raise InvalidRequest("no prompts: give them as arguments, with --file or on standard input")
    if form is None:
        by_name = file is not None and file.suffix in (".jsonl", ".ndjson")
        form = Format.JSONL if by_name else Format.TEXT
    try:
        stream = sys.stdin if file is None else file.open(encoding="utf-8")
        with contextlib.nullcontext() if file is None else stream:
            source = "standard input" if file is None else str(file)
            lines = read_text(stream) if form is Format.TEXT else read_jsonl(stream, source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--file {file}: {error}") from None
    if not lines:
        raise InvalidRequest("no prompts: the input is empty")
    return lines


def _generate(
    pool: EnginePool, lines: Sequence[PromptLine], chosen: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    params: list[dict[str, Any] | None] = [None] * len(lines)
    if chosen or any(line.sampling_params for line in lines):
        # An option changes what it names and leaves the checkpoint's other defaults alone.
        from enginepool.tokenizer import generation_defaults

        defaults = generation_defaults(pool.engines[0].server_args)
        params = [defaults | chosen | (line.sampling_params or {}) for line in lines]
    options["progress"] = sys.stderr.isatty()
    if all(line.kind == "prompt" for line in lines):
        return pool.generate_all([line.value for line in lines], params, **options)
    # One call for all kinds, so that seeds and `prompt_index` count the lines of the input.
    ids = [_token_ids(pool, index, line) for index, line in enumerate(lines)]
    return pool.generate_all(sampling_params=params, input_ids=ids, **options)


def _token_ids(pool: EnginePool, index: int, line: PromptLine) -> Any:
    tokenizer = pool.engines[0].tokenizer_manager.tokenizer
    if line.kind == "input_ids":
        return line.value
    if line.kind == "prompt":
        if not isinstance(line.value, str):
            raise InvalidRequest(f"expected a string, got {line.value!r}", prompt_index=index)
        return tokenizer(line.value)["input_ids"]
    try:
        return tokenizer.apply_chat_template(line.value, tokenize=True, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise InvalidRequest(f"messages: {error}", prompt_index=index) from error


def _write(results: Sequence[dict[str, Any]], output: Format) -> None:
    for result in results:
        if output is Format.TEXT:
            print(result["text"])
        else:
            index = result["meta_info"]["prompt_index"]
            print(json.dumps({"prompt_index": index, **result}, ensure_ascii=False))


if __name__ == "__main__":
    main()
