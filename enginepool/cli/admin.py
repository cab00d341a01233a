"""`enginepool admin`: ask a running server for what administrators may."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from enginepool.console.complaints import complain
from enginepool.engine.states import PauseMode
from enginepool.serve.options import TOKEN_VARIABLE

admin = typer.Typer(no_args_is_help=True, help="Ask a running server for what administrators may.")


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
def pause(context: typer.Context, mode: Annotated[PauseMode, typer.Option()] = "retract") -> None:
    """Stop all engines."""
    _ask(context, "POST", "pause", mode=mode)


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
