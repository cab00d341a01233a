"""`enginepool serve`.

What imports FastAPI or sgl_jax is imported inside the command, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginepool.cli.arguments import Devices, WarmupOption, parse_devices, parse_ports
from enginepool.cli.config_file import left_to_upstream, take
from enginepool.config import PoolConfig
from enginepool.console.complaints import clear_errors
from enginepool.serve.options import TOKEN_VARIABLE, ServeOptions

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool

SERVE_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port of the whole pool; 0 for any free port.")]
Ports = Annotated[
    str | None, typer.Option(help="Also one port for each engine, such as 31000-31003.")
]
ApiKey = Annotated[
    str | None, typer.Option(help="Bearer token of requests.", envvar="ENGINEPOOL_API_KEY")
]
EnableAdmin = Annotated[bool, typer.Option("--enable-admin", help="Serve administrators' routes.")]
AdminToken = Annotated[
    str | None, typer.Option(help="Bearer token of administrators.", envvar=TOKEN_VARIABLE)
]
TrustedAdmins = Annotated[
    str | None,
    typer.Option(
        help="Addresses and networks whose administrators need no token, such as 10.0.0.0/8."
    ),
]
ModelRoot = Annotated[
    Path | None,
    typer.Option(help="Directory below which reloads may read. Default: only the model itself."),
]
LoraResolverDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory with a folder for each LoRA adapter. If a request's model is the name of a "
        "folder, that adapter is loaded."
    ),
]
RejectWhileReloading = Annotated[
    bool,
    typer.Option(
        "--reject-while-reloading", help="During a reload, answer 503 instead of waiting."
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        help="The most requests that may wait for an engine. More get 429. It is also the limit of "
        "one call: its prompts times their samples."
    ),
]
MaxBodyBytes = Annotated[int, typer.Option(help="The most bytes of a request's body.")]
MaxPrompts = Annotated[int, typer.Option(help="The most prompts of one request.")]
MaxN = Annotated[int, typer.Option(help="The most samples of one prompt.")]
RequestTimeout = Annotated[
    float | None, typer.Option(help="Seconds for one request, from the moment it is queued.")
]
DrainTimeout = Annotated[
    float, typer.Option(help="Seconds that running requests get after SIGTERM.")
]
HeaderTimeout = Annotated[float, typer.Option(help="Seconds for a request's headers to come.")]
BodyTimeout = Annotated[float, typer.Option(help="Seconds for its body after that.")]
KeepAliveTimeout = Annotated[
    int, typer.Option(help="Seconds that a connection is kept without a request.")
]
Restart = Annotated[bool, typer.Option(help="Bring back an engine whose step failed.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        help="How many failures in a row, within a minute, an engine may have before it stays out."
    ),
]
StepTimeout = Annotated[float | None, typer.Option(help="Seconds until a step counts as stuck.")]
MaxDecodeSteps = Annotated[
    int,
    typer.Option(
        help="The most decode steps of one program. A program has several if the device would "
        "otherwise idle, or if no request streams and none waits to join."
    ),
]
ClampMaxNewTokens = Annotated[
    bool,
    typer.Option(
        "--clamp-max-new-tokens", help="Cut a max_new_tokens that does not fit. Default: refuse it."
    ),
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log the beginning of prompts.")]
Config = Annotated[
    Path | None,
    typer.Option(
        is_eager=True, callback=take,
        help="A YAML or TOML file of these options and upstream's. The command line overrides it.",
    ),
]  # fmt: skip


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from enginepool.cli.server_args import upstream_help

        print(context.get_help())
        print(upstream_help({option.name for option in context.command.params if option.name}))
        raise typer.Exit()


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_all, help="Also show upstream's options."
    ),
]


def serve(
    context: typer.Context,
    devices: Devices = None,
    warmup: WarmupOption = PoolConfig.warmup,
    host: Host = ServeOptions.host,
    port: Port = ServeOptions.port,
    ports: Ports = None,
    api_key: ApiKey = None,
    enable_admin: EnableAdmin = False,
    admin_token: AdminToken = None,
    trusted_admins: TrustedAdmins = None,
    model_root: ModelRoot = None,
    lora_resolver_dir: LoraResolverDir = None,
    reject_while_reloading: RejectWhileReloading = False,
    max_queued_requests: MaxQueuedRequests = 4096,
    max_body_bytes: MaxBodyBytes = ServeOptions.max_body_bytes,
    max_prompts: MaxPrompts = ServeOptions.max_prompts,
    max_n: MaxN = ServeOptions.max_n,
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = ServeOptions.drain_timeout,
    header_timeout: HeaderTimeout = ServeOptions.header_timeout,
    body_timeout: BodyTimeout = ServeOptions.body_timeout,
    keep_alive_timeout: KeepAliveTimeout = ServeOptions.keep_alive_timeout,
    restart: Restart = PoolConfig.restart,
    max_restarts: MaxRestarts = PoolConfig.max_restarts,
    step_timeout: StepTimeout = PoolConfig.step_timeout,
    max_decode_steps: MaxDecodeSteps = PoolConfig.max_decode_steps,
    clamp_max_new_tokens: ClampMaxNewTokens = False,
    log_prompts: LogPrompts = False,
    config: Config = None,
    help_all: HelpAll = False,
) -> None:
    """Serve [MODEL] over HTTP: OpenAI's endpoints and sglang's. Without a model, it serves the toy.

    Every option of upstream's ServerArgs is accepted under its own flag, such as --dtype bfloat16
    --context-length 8192 (--help-all shows them). Name the model first, or with --model-path.
    """
    del config, help_all  # their callbacks have used them
    with clear_errors():
        options = ServeOptions(
            host=host, port=port, engine_ports=parse_ports(ports), api_key=api_key,
            enable_admin=enable_admin, admin_token=admin_token,
            trusted_admins=tuple((trusted_admins or "").replace(",", " ").split()),
            model_root=model_root, lora_resolver_dir=lora_resolver_dir,
            reject_while_reloading=reject_while_reloading, max_body_bytes=max_body_bytes,
            max_prompts=max_prompts, max_n=max_n, request_timeout=request_timeout,
            drain_timeout=drain_timeout, header_timeout=header_timeout, body_timeout=body_timeout,
            keep_alive_timeout=keep_alive_timeout, clamp_max_new_tokens=clamp_max_new_tokens,
            log_prompts=log_prompts,
        )  # fmt: skip
        from enginepool.cli.server_args import parse_upstream_flags
        from enginepool.pool.pool import EnginePool

        model, server_args = parse_upstream_flags(context.args, left_to_upstream(context))
        pool = EnginePool(
            model, devices=parse_devices(devices), warmup=warmup, restart=restart,
            max_restarts=max_restarts, step_timeout=step_timeout,
            max_decode_steps=max_decode_steps, max_queued=max_queued_requests,
            when_full="raise", progress=False, **server_args,  # the log shows the progress
        )  # fmt: skip
        _serve(pool, options, server_args.get("log_level"))


def _serve(pool: EnginePool, options: ServeOptions, upstream_level: str | None) -> None:
    """Serve a pool. The ports are taken first, because engines take minutes to start."""
    from enginepool.serve.log import LogLines
    from enginepool.serve.log_format import log_to
    from enginepool.serve.server import Server

    server = Server(pool, options)
    lines = LogLines(None if sys.stderr is None else sys.stderr.fileno())
    terminal = sys.stderr is not None and sys.stderr.isatty()
    log_to(lines, terminal=terminal, upstream_level=upstream_level)
    try:
        with pool:
            server.run()
    finally:
        server.close()
        lines.close()
