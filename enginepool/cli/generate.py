"""`enginepool generate`: prompts from arguments, a file or standard input; results as they end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.arguments import (
    Devices,
    Dtype,
    Model,
    ServerArg,
    TpSize,
    WarmupOption,
    make_arguments,
)
from enginepool.cli.prompt_file import Format, PromptLine, decode, read_jsonl, read_text
from enginepool.cli.result_lines import ResultLines
from enginepool.config import PoolConfig
from enginepool.console.complaints import complain
from enginepool.console.output import check_output, engine_line
from enginepool.errors import InvalidRequest
from enginepool.frontend.progress_bar import progress_bar
from enginepool.frontend.prompts import read_prompts

if TYPE_CHECKING:
    from enginepool.frontend.tokenizer import Tokenizer
    from enginepool.pool.pool import EnginePool


Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts.")]
File = Annotated[
    Path | None, typer.Option(help="Prompts, one per line; a name in .jsonl means JSON objects.")
]
InputFormat = Annotated[
    Format | None, typer.Option("--input", help="What the file or standard input holds.")
]
Output = Annotated[Format, typer.Option(help="Text alone, or the whole result as JSON.")]
Samples = Annotated[int | None, typer.Option(help="Samples of each prompt.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same samples.")]
ReturnLogprob = Annotated[
    bool, typer.Option("--return-logprob", help="Log-probabilities in the JSON.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds for all prompts.")]


def generate(
    prompts: Prompts = None,
    file: File = None,
    input_format: InputFormat = None,
    output: Output = Format.TEXT,
    model: Model = None,
    devices: Devices = None,
    tp_size: TpSize = 1,
    warmup: WarmupOption = PoolConfig.warmup,
    dtype: Dtype = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    n: Samples = None,
    seed: Seed = None,
    return_logprob: ReturnLogprob = False,
    timeout: Timeout = None,
    server_arg: ServerArg = None,
) -> None:
    """Generate for every prompt, on all engines.

    Text comes in input order. JSON comes as results end, with "prompt_index". Prompts come from the
    arguments, --file, or standard input. A line of JSON has "prompt", "input_ids" or "messages",
    and may have "sampling_params", which override the options.

    As in Python, the checkpoint's generation_config.json applies to prompts without any sampling
    parameter. If a prompt has one, its other parameters are sglang-jax's defaults (temperature 1).
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
    lines = _read(prompts or [], file, input_format)
    arguments = make_arguments(devices, tp_size, dtype, server_arg, warmup=warmup)
    check_output()
    from enginepool.pool.pool import EnginePool

    with _opened(EnginePool(model, **arguments)) as pool:
        failed = _generate(
            pool, lines, chosen, output, return_logprob=return_logprob, timeout=timeout
        )
    for meta in failed:
        complain(f"prompt {meta['prompt_index']}: {meta['finish_reason'].get('message')}")
    raise typer.Exit(1 if failed else 0)


def _opened(pool: EnginePool) -> EnginePool:
    """On a terminal, print a line for each engine, because opening takes a minute or more."""
    if sys.stderr is not None and sys.stderr.isatty():
        pool.open(on_engine=lambda engine: print(engine_line(engine), file=sys.stderr))
    return pool


def _read(prompts: list[str], file: Path | None, form: Format | None) -> list[PromptLine]:
    if prompts and file is not None:
        raise InvalidRequest("give prompts as arguments or with --file, and not both")
    if prompts:
        return [PromptLine("prompt", text) for text in prompts]
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        why = "standard input is closed; " if sys.stdin is None else ""
        raise InvalidRequest(
            f"no prompts: {why}give them as arguments, with --file or on standard input"
        )
    if form is None:
        by_name = file is not None and file.suffix in (".jsonl", ".ndjson")
        form = Format.JSONL if by_name else Format.TEXT
    source = "standard input" if file is None else str(file)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file is None else file.open("rb") as found:
            text = decode(found, source)
            lines = read_text(text) if form is Format.TEXT else read_jsonl(text, source)
    except OSError as error:
        raise InvalidRequest(f"{source}: {error.strerror or error}") from None
    if not lines:
        raise InvalidRequest("no prompts: the input is empty")
    return lines


def _generate(
    pool: EnginePool,
    lines: Sequence[PromptLine],
    chosen: dict[str, Any],
    output: Format,
    **options: Any,
) -> list[dict[str, Any]]:
    """Write every result when it ends; returns the meta_info of those that ended early."""
    params = [_sampling_params(chosen, line) for line in lines]
    if all(line.kind == "prompt" for line in lines):
        results: Any = pool.async_as_completed([line.value for line in lines], params, **options)
    else:
        # One call for all kinds, so seeds and `prompt_index` count the lines of the input.
        ids = _token_ids(pool.runtime.input_processor.tokenizer, lines)
        results = pool.async_as_completed(sampling_params=params, input_ids=ids, **options)
    written = ResultLines(sys.stdout.buffer, output, [_samples(one or {}) for one in params])
    try:
        failed = asyncio.run(_write(results, written))
    except KeyboardInterrupt:
        written.rest()
        raise KeyboardInterrupt(
            f"interrupted: {written.ended} of {written.total} outputs had ended and are written"
        ) from None
    return sorted(failed, key=lambda meta: (meta["prompt_index"], meta["sample_index"]))


async def _write(results: Any, written: ResultLines) -> list[dict[str, Any]]:
    """Run on an event loop. There Ctrl-C ends a task where it waits, and never in the middle of a
    line."""
    failed = []
    async with contextlib.aclosing(results):
        with _bar(written) as tick:
            async for result in results:
                written.add(result)
                if result["meta_info"]["finish_reason"]["type"] == "abort":
                    failed.append(result["meta_info"])
                if tick is not None:
                    tick()
    return failed


def _sampling_params(chosen: dict[str, Any], line: PromptLine) -> dict[str, Any] | None:
    """The sampling parameters that were given, as a caller in Python would write them. None if none
    were given."""
    if not chosen and line.sampling_params is None:
        return None
    return chosen | (line.sampling_params or {})


def _samples(params: dict[str, Any]) -> int:
    n = params.get("n")
    return n if isinstance(n, int) else 1  # None means 1, and other values are refused


def _bar(written: ResultLines) -> Any:
    """A progress bar, unless results appear on the terminal themselves."""
    wanted = sys.stderr is not None and sys.stderr.isatty() and not sys.stdout.isatty()
    return progress_bar(written.total, lambda: (written.ended, written.tokens), wanted)


def _token_ids(tokenizer: Tokenizer, lines: Sequence[PromptLine]) -> list[Any]:
    """The ids of each line, from its text, its conversation, or as they are."""
    texts = [line.value if line.kind == "prompt" else "" for line in lines]
    _, ids, _ = read_prompts(tokenizer, texts, None)
    for index, line in enumerate(lines):
        if line.kind == "messages":
            ids[index] = tokenizer.apply_chat_template(index, line.value)
        elif line.kind == "input_ids":
            ids[index] = line.value
    return ids
