"""`enginepool admin`: a client that administers servers."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from enginepool.console.complaints import complain
from enginepool.dispatch.condition import PauseMode
from enginepool.errors import InvalidConfig
from enginepool.serve.options import TOKEN_VARIABLE

admin = typer.Typer(
    no_args_is_help=True,
    help="Administer one or more running servers.",
)


@dataclass(frozen=True)
class Servers:
    """The servers to ask, and how to reach them."""

    urls: list[str]
    token: str | None
    timeout: float


@admin.callback()
def _where(
    context: typer.Context,
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="Any port of a server; once for each server. Required."),
    ] = None,
    every_address: Annotated[
        bool,
        typer.Option(
            "--every-address",
            help="Ask every address that the host name resolves to, such as the pods of a "
            "headless Service.",
        ),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            help="The admin token. On a server without one: the API key, if it has one.",
            envvar=TOKEN_VARIABLE,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.")] = 600.0,
) -> None:
    # Typer does not require --base-url. If it did, `admin reload --help` would need it as well.
    given = base_url or []
    urls = [url for one in given for url in (addresses(one) if every_address else [one])]
    context.obj = Servers(list(dict.fromkeys(urls)), token, timeout)


@admin.command()
def checksum(context: typer.Context) -> None:
    """The checksum of the `reference` command, over the beginning of the first leaves, and a
    fingerprint of all weights. Exits with 1 if the fingerprints of servers differ."""
    answers = _ask(context, "GET", "weights_checksum")
    found = {answer.get("fingerprint") if isinstance(answer, dict) else None for answer in answers}
    if None in found:
        complain("an answer has no fingerprint: give the --base-url of servers of enginepool")
        raise typer.Exit(1)
    if len(found) > 1:
        complain("the servers' weights differ")
        raise typer.Exit(1)


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
def reload(
    context: typer.Context,
    model_path: str,
    weight_version: Annotated[
        str | None, typer.Option(help="Label of the new weights. Default: the update's number.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="What happens to running requests: drain, retract, abort or in_place."),
    ] = None,
) -> None:
    """Load a checkpoint on every engine."""
    given = {"weight_version": weight_version, "mode": mode}
    body = {name: value for name, value in given.items() if value is not None}
    _ask(context, "POST", "reload_weights", model_path=model_path, **body)


@admin.command()
def status(context: typer.Context) -> None:
    """Whether weights are being loaded, and the outcome of the last reload."""
    _ask(context, "GET", "reload_status")


@admin.command()
def pause(context: typer.Context, mode: Annotated[PauseMode, typer.Option()] = "retract") -> None:
    """Stop all engines."""
    _ask(context, "POST", "pause", mode=mode)


@admin.command("continue")
def resume(context: typer.Context) -> None:
    """Let all engines continue."""
    _ask(context, "POST", "continue")


def addresses(base_url: str) -> list[str]:
    """The URL with each address of its host's name, in their order.

    Raises:
        InvalidConfig: There is no host, or its name has no address.
    """
    try:
        parts = urlsplit(base_url)
        if not parts.hostname:  # otherwise the addresses would be those of this machine
            raise ValueError("expected a URL with a host, such as http://hosts:30000")
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"--base-url {base_url}: {error}") from None
    hosts = sorted({str(where[0]) for *_, where in found})
    port = "" if parts.port is None else f":{parts.port}"
    return [
        parts._replace(netloc=(f"[{host}]" if ":" in host else host) + port).geturl()
        for host in hosts
    ]


def _ask(context: typer.Context, method: str, name: str, **body: Any) -> list[Any]:
    """Print each answer as JSON, with the URL if there are several servers. After all have
    answered, exit with 1 unless all succeeded."""
    servers: Servers = context.obj
    if not servers.urls:
        raise typer.BadParameter("give it before the command", param_hint="--base-url")
    with ThreadPoolExecutor(len(servers.urls)) as executor:
        said = list(
            executor.map(lambda url: _answer(servers, url, method, name, body), servers.urls)
        )
    for url, (_, answer) in zip(servers.urls, said, strict=True):
        if answer is not None:
            shown = answer if len(said) == 1 else {"base_url": url, "answer": answer}
            print(json.dumps(shown, ensure_ascii=False))
    if not all(succeeded for succeeded, _ in said):
        raise typer.Exit(1)
    return [answer for _, answer in said]


def _answer(
    servers: Servers, url: str, method: str, name: str, body: dict[str, Any]
) -> tuple[bool, Any]:
    """Whether the server succeeded, and its answer. None if there is no answer; then a complaint is
    printed."""
    import httpx

    token = servers.token
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        reply = httpx.request(
            method,
            f"{url.rstrip('/')}/admin/{name}",
            json=body or None,
            headers=headers,
            timeout=servers.timeout,
        )
        return not reply.is_error, reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        complain(f"{url}: {error!r}")
        return False, None
