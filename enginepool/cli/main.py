"""The command line: `enginepool generate`, `serve`, `admin`, `doctor`, `plan`, `demo`, `reference`.

Whatever imports sgl_jax is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.admin import admin
from enginepool.cli.arguments import (
    Devices,
    Dtype,
    Model,
    ServerArg,
    TpSize,
    make_arguments,
    parse_devices,
    parse_server_args,
)
from enginepool.cli.generate import generate
from enginepool.cli.reference import app as reference
from enginepool.cli.serve import SERVE_CONTEXT, serve
from enginepool.console.complaints import Commands, complain
from enginepool.console.output import watch_output
from enginepool.errors import InvalidConfig
from enginepool.process.quick_exit import quick_exit

if TYPE_CHECKING:
    from enginepool.config import PoolConfig

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command(context_settings=SERVE_CONTEXT)(serve)
app.add_typer(admin, name="admin")
app.add_typer(reference, name="reference")


def main() -> None:
    watch_output()
    with quick_exit():
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
    """Run one sglang-jax engine on each accelerator device of a host, behind one call."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that JAX may take to start.")] = 60.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Open a pool, and measure the CPU time of its steps.")
    ] = False,
    first_run: Annotated[
        bool,
        typer.Option("--first-run", help="On a TPU: try everything with the toy, for a report."),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds for --first-run; checks that do not fit are skipped. Default: 600.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the report of --first-run. Default: standard output."),
    ] = None,
    model: Model = None,
    devices: Devices = None,
    tp_size: TpSize = 1,
    dtype: Dtype = None,
    server_arg: ServerArg = None,
) -> None:
    """Look at what engines need: devices and who holds them, versions, patches, environment.

    With a model or options on a TPU host, it says what is wrong with these settings, before an
    engine is built. With --profile, it measures where a step's time goes for the model and options,
    and how many engines one process can feed. With --first-run, it checks builds, answers, swaps,
    memory and the compilation cache on all devices, and page sizes on the first. It writes one JSON
    object to send in, and exits with 1 if a check fails.
    """
    if first_run:
        given = {"--model": model, "--dtype": dtype, "--server-arg": server_arg}
        given |= {"--profile": profile or None, "--tp-size": None if tp_size == 1 else tp_size}
        _first_run(parse_devices(devices), budget or 600.0, timeout, output, given)
        return
    for name, value in {"--output": output, "--budget": budget}.items():
        if value is not None:
            raise InvalidConfig(f"{name} {value} goes with --first-run only; leave it out")
    if profile:
        _profile(model, make_arguments(devices, tp_size, dtype, server_arg), as_json)
        return
    from enginepool.doctor.environment import examine, show

    arguments = make_arguments(devices, tp_size, dtype, server_arg)
    report = examine(timeout, _config(model, arguments))
    print(json.dumps(report, indent=2)) if as_json else show(report)
    raise typer.Exit(1 if report["problems"] else 0)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Directory, config.json or hub id.")],
    topology: Annotated[str, typer.Option(help="One host: v4-8, v5e-1/4/8 or v6e-1/4/8.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request. Default: the checkpoint's.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests in flight on the host.")] = 64,
    tp_size: TpSize = 1,
    dtype: Dtype = None,
    by_compiler: Annotated[
        bool,
        typer.Option(
            "--compile", help="Also compile an engine's programs with libtpu. It takes minutes."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    server_arg: ServerArg = None,
) -> None:
    """Say whether a model fits a TPU host, how much memory is left, and how fast it can be at best.

    The figures are computed from the model's configuration, without a TPU: memory of weights and
    KV, requests, a second weight set, and layouts of one or several chips per engine. With
    --compile, the compiler reports what programs need and how long compiling takes. Exits with 1 if
    the model does not fit.
    """
    arguments = parse_server_args(server_arg or [], ("model", "tp_size"))
    arguments |= {} if dtype is None else {"dtype": dtype}
    from enginepool.doctor.plan.plan import make
    from enginepool.doctor.plan.report import show

    found = make(
        model,
        topology,
        context=context,
        batch=batch,
        tp_size=tp_size,
        server_args=arguments,
        by_compiler=by_compiler,
    )
    print(json.dumps(found, indent=2, ensure_ascii=False)) if as_json else show(found)
    raise typer.Exit(0 if found["fits"] else 1)


@app.command()
def demo(
    engines: Annotated[int, typer.Option(min=1, help="Engines, one per device.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="How many sums to ask for.")] = 64,
) -> None:
    """Watch engines come up and answer sums side by side, with the toy model."""
    from enginepool.cli.demo import run

    run(engines, prompts)


def _config(model: str | None, arguments: dict[str, Any]) -> PoolConfig | None:
    """The pool's configuration from the options that were given. None if none were given."""
    own = {name: arguments.pop(name) for name in ("devices", "tp_size")}
    if model is None and not arguments and own["tp_size"] == 1:
        return None
    from enginepool import toy
    from enginepool.config import PoolConfig

    return PoolConfig(model or str(toy.checkpoint()), **own, server_args=arguments)


def _first_run(
    devices: int | list[int] | None,
    budget: float,
    timeout: float,
    output: Path | None,
    given: dict[str, Any],
) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidConfig(
                f"{name} does not go with --first-run: it runs the same checks with the toy "
                "everywhere, so that reports can be compared; leave it out"
            )
    if output is not None:
        try:
            output.open("a").close()  # fails now, and not after ten minutes of checks
        except OSError as error:
            raise InvalidConfig(f"--output {output}: {error.strerror}") from None
    from enginepool.doctor.first_run.run import first_run

    report = first_run(
        devices, budget=budget, start=timeout, say=lambda text: print(text, file=sys.stderr)
    )
    text = json.dumps(report, indent=2)
    written = _write(output, text)
    if report["interrupted"]:
        raise KeyboardInterrupt("interrupted; the report has the checks so far")
    raise typer.Exit(0 if report["ok"] and written else 1)


def _write(output: Path | None, text: str) -> bool:
    """Write a report, which took minutes. If the file cannot be written, standard output gets it.
    Returns whether it is where it should be."""
    try:
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")
            return True
    except OSError as error:
        complain(f"--output {output}: {error.strerror}; the report is on standard output")
    print(text)
    return output is None


def _profile(model: str | None, arguments: dict[str, Any], as_json: bool) -> None:
    from enginepool.doctor.profile import profile, show_profile
    from enginepool.pool.pool import EnginePool

    with EnginePool(model, **arguments) as pool:
        args: Any = pool.engines[0].server_args
        report = profile(pool, requests=min(args.max_running_requests or 8, 8), tokens=64)
    print(json.dumps(report, indent=2)) if as_json else show_profile(report)


if __name__ == "__main__":
    main()
