"""The options of a server, checked before anything starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from enginepool.errors import InvalidConfig

LAST_PORT = 65535
TOKEN_VARIABLE = "ENGINEPOOL_ADMIN_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of one server. Those of its pool are in PoolConfig.

    Attributes:
        port: The port of the whole pool; 0 for any free one.
        engine_ports: A port for each engine, in the engines' order; empty for none.
        trusted_admins: Addresses and networks from which administrators come without a token.
        model_root: Reloads and adapters are read below this directory. The model that the
            server started with, and the one that it serves, can always be loaded.
        lora_resolver_dir: An adapter that a request names, and that is not loaded, is loaded from
            the folder of its name in this directory.
        request_timeout: Seconds from the queue on. A request that takes longer is ended. The reply
            is an error (504), and a stream ends with an error.
        drain_timeout: Seconds that running requests get to finish when the server is asked to end.
        header_timeout: Seconds that the headers of a request may take to come.
        body_timeout: Seconds that its body may take after them.
        keep_alive_timeout: Seconds that a connection is kept for a further request.
        clamp_max_new_tokens: Cut a `max_new_tokens` that is too large to the room after its prompt,
            as sglang does. Otherwise it is refused.
        log_prompts: Put the prompts' text into the log.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    engine_ports: tuple[int, ...] = ()
    api_key: str | None = None
    enable_admin: bool = False
    admin_token: str | None = None
    trusted_admins: tuple[str, ...] = ()
    model_root: Path | None = None
    lora_resolver_dir: Path | None = None
    reject_while_reloading: bool = False
    max_body_bytes: int = 16 << 20
    max_prompts: int = 1024
    max_n: int = 128
    request_timeout: float | None = None
    drain_timeout: float = 60.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive_timeout: int = 5
    clamp_max_new_tokens: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        ports = [port for port in (self.port, *self.engine_ports) if port]
        for port in (self.port, *self.engine_ports):
            if not 0 <= port <= LAST_PORT:
                raise InvalidConfig(f"port {port}: expected 0 (any that is free) to {LAST_PORT}")
        if len(set(ports)) < len(ports):
            raise InvalidConfig(f"ports {ports}: the pool and each engine need a port of their own")
        for name in ("max_body_bytes", "max_prompts", "max_n"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected 1 or more")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise InvalidConfig(f"request_timeout={self.request_timeout}: expected seconds above 0")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected seconds above 0")
        if not self.drain_timeout >= 0:
            raise InvalidConfig(f"drain_timeout={self.drain_timeout}: expected seconds")
        self._check_secrets()
        for one in self.trusted_admins:
            _check_network(one)
        for option in ("model_root", "lora_resolver_dir"):
            folder = getattr(self, option)
            if folder is not None and not folder.is_dir():
                flag = option.replace("_", "-")
                raise InvalidConfig(f"--{flag} {folder}: no such directory")

    def _check_secrets(self) -> None:
        for name, secret in (("--api-key", self.api_key), ("--admin-token", self.admin_token)):
            if secret is not None and not secret.strip():
                raise InvalidConfig(f"{name} is empty: give a secret, or leave it out")
            if secret is not None and secret != secret.strip():
                raise InvalidConfig(
                    f"{name} begins or ends with whitespace, such as a line's end: a header cannot "
                    "hold that, so no request would be allowed; remove it"
                )
        if not self.enable_admin:
            given = {
                "--admin-token": self.admin_token,
                "--trusted-admins": self.trusted_admins or None,
                "--model-root": self.model_root,
            }
            for name, value in given.items():
                if value is not None:
                    raise InvalidConfig(f"{name} needs --enable-admin")
        elif not (self.admin_token or self.trusted_admins or is_loopback(self.host)):
            raise InvalidConfig(
                f"--enable-admin with --host {self.host}: others can reach that address; give "
                f"--admin-token (or {TOKEN_VARIABLE}), name the addresses that need none "
                "(--trusted-admins), or bind to 127.0.0.1"
            )

    def trusts(self, address: str) -> bool:
        """Whether administrators from there need no token."""
        try:
            client = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        client = getattr(client, "ipv4_mapped", None) or client
        return any(client in ipaddress.ip_network(one) for one in self.trusted_admins)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_network(text: str) -> None:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidConfig(f"--trusted-admins {text!r}: {error}") from None
    if network.prefixlen == 0:
        raise InvalidConfig(
            f"--trusted-admins {text}: that allows every address; name the addresses or networks "
            "that you trust"
        )
