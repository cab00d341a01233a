"""`enginepool serve` and `enginepool admin`.

What imports FastAPI or sgl_jax is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import structlog
import typer

from enginepool.cli.arguments import parse_devices
from enginepool.cli.options import Devices, Warmup, WarmupOption
from enginepool.config import PoolConfig
from enginepool.console.complaints import clear_errors, complain
from enginepool.serve.options import TOKEN_VARIABLE, ServeOptions, parse_ports

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool
    from enginepool.serve.log import LogLines

SERVE_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}

admin = typer.Typer(no_args_is_help=True, help="Ask a running server for what administrators may.")


class PauseMode(StrEnum):
    """What becomes of running requests."""

    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


def serve(
    context: typer.Context,
    devices: Devices = None,
    warmup: WarmupOption = Warmup.SEQUENTIAL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the whole pool; 0 for any that is free.")] = 30000,
    ports: Annotated[
        str | None, typer.Option(help="One for each engine as well, as in 31000-31003.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="What requests must bring.", envvar="ENGINEPOOL_API_KEY")
    ] = None,
    enable_admin: Annotated[bool, typer.Option("--enable-admin", help="Serve /admin/….")] = False,
    admin_token: Annotated[
        str | None,
        typer.Option(help="What administrators must bring.", envvar=TOKEN_VARIABLE),
    ] = None,
    model_root: Annotated[
        Path | None, typer.Option(help="Where reloads may read; else only the model itself.")
    ] = None,
    reject_while_reloading: Annotated[
        bool, typer.Option("--reject-while-reloading", help="503 instead of waiting.")
    ] = False,
    max_queued_requests: Annotated[
        int, typer.Option(help="How many may wait for an engine; beyond it 429.")
    ] = 4096,
    max_body_bytes: Annotated[int, typer.Option()] = 16 << 20,
    max_prompts: Annotated[int, typer.Option(help="In one request.")] = 1024,
    max_n: Annotated[int, typer.Option(help="Samples of one prompt.")] = 128,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds.")] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = 60.0,
    restart: Annotated[
        bool, typer.Option(help="Bring back an engine whose step failed.")
    ] = PoolConfig.restart,
    max_restarts: Annotated[
        int, typer.Option(help="In a row and within a minute.")
    ] = PoolConfig.max_restarts,
    step_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a step counts as stuck.")
    ] = PoolConfig.step_timeout,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Prompts in the log.")] = False,
) -> None:
    """Serve [MODEL] over HTTP: OpenAI's endpoints and sglang's. Left out, the toy.

    Every option of upstream's ServerArgs is taken under its own flag, as in --dtype bfloat16
    --context-length 8192. Name the model first, or with --model-path.
    """
    with clear_errors():
        options = ServeOptions(
            host=host,
            port=port,
            engine_ports=parse_ports(ports),
            api_key=api_key,
            enable_admin=enable_admin,
            admin_token=admin_token,
            model_root=model_root,
            reject_while_reloading=reject_while_reloading,
            max_body_bytes=max_body_bytes,
            max_prompts=max_prompts,
            max_n=max_n,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            log_prompts=log_prompts,
        )
        from enginepool.pool.pool import EnginePool
        from enginepool.serve.flags import parse_upstream_flags

        model, server_args = parse_upstream_flags(context.args)
        pool = EnginePool(
            model,
            devices=parse_devices(devices),
            warmup=warmup.value,
            restart=restart,
            max_restarts=max_restarts,
            step_timeout=step_timeout,
            max_queued=max_queued_requests,
            when_full="raise",
            **server_args,
        )
        _serve(pool, options)


def _serve(pool: EnginePool, options: ServeOptions) -> None:
    """The ports are taken first: engines take minutes."""
    from enginepool.serve.log import LogLines
    from enginepool.serve.server import Server

    server = Server(pool, options)
    lines = LogLines(None if sys.stderr is None else sys.stderr.fileno())
    _log_to(lines)
    try:
        with pool:
            server.run()
    finally:
        server.close()
        lines.close()


def _log_to(lines: LogLines) -> None:
    """One line an event: for people on a terminal, else JSON. Upstream logs errors only."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer()
            if terminal
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, lines)),
    )


@admin.callback()
def _where(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="Any port of the server.")],
    token: Annotated[
        str | None, typer.Option(help="The admin token.", envvar=TOKEN_VARIABLE)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 600.0,
) -> None:
    context.obj = (base_url, token, timeout)


@admin.command()
def checksum(context: typer.Context) -> None:
    """The reference's checksum, and a fingerprint of all weights."""
    _ask(context, "GET", "weights_checksum")


@admin.command()
def perturb(
    context: typer.Context,
    seed: Annotated[int, typer.Option()] = 0,
    scale: Annotated[float, typer.Option()] = 1e-3,
    num_leaves: Annotated[int, typer.Option()] = 1,
) -> None:
    """Add noise to the first leaves of every engine."""
    _ask(context, "POST", "perturb_weights", seed=seed, scale=scale, num_leaves=num_leaves)


@admin.command()
def reload(context: typer.Context, model_path: str) -> None:
    """Load a checkpoint on every engine."""
    _ask(context, "POST", "reload_weights", model_path=model_path)


@admin.command()
def status(context: typer.Context) -> None:
    """Whether weights are being loaded, and how the last time went."""
    _ask(context, "GET", "reload_status")


@admin.command()
def pause(
    context: typer.Context, mode: Annotated[PauseMode, typer.Option()] = PauseMode.RETRACT
) -> None:
    """Stop all engines."""
    _ask(context, "POST", "pause", mode=mode.value)


@admin.command("continue")
def resume(context: typer.Context) -> None:
    """Let them go on."""
    _ask(context, "POST", "continue")


def _ask(context: typer.Context, method: str, name: str, **body: Any) -> None:
    """Print the answer as JSON; exit with 1 if it is no success."""
    import httpx

    base_url, token, timeout = context.obj
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        reply = httpx.request(
            method,
            f"{base_url.rstrip('/')}/admin/{name}",
            json=body or None,
            headers=headers,
            timeout=timeout,
        )
        answer = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        complain(f"{base_url}: {error!r}")
        raise typer.Exit(1) from None
    print(json.dumps(answer, ensure_ascii=False))
    if reply.is_error:
        raise typer.Exit(1)
