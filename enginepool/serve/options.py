"""The options of a server, checked before anything starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from enginepool.errors import InvalidConfig

TOKEN_VARIABLE = "ENGINEPOOL_ADMIN_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of one server; those of the pool are the pool's.

    Attributes:
        port: Of the whole pool; 0 for any that is free.
        engine_ports: A port for each engine, in the engines' order; empty for none.
        model_root: Reloads read below this directory only; without it, only the model that the
            server started with.
        request_timeout: Seconds; a request that takes longer ends with what it has.
        drain_timeout: Seconds that running requests get to finish when the server is asked to end.
        header_timeout: Seconds that the headers of a request may take to come.
        body_timeout: Seconds that its body may take after them.
        keep_alive_timeout: Seconds that a connection is kept for a further request.
        log_prompts: Put the prompts' text into the log.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    engine_ports: tuple[int, ...] = ()
    api_key: str | None = None
    enable_admin: bool = False
    admin_token: str | None = None
    model_root: Path | None = None
    reject_while_reloading: bool = False
    max_body_bytes: int = 16 << 20
    max_prompts: int = 1024
    max_n: int = 128
    request_timeout: float | None = None
    drain_timeout: float = 60.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive_timeout: int = 5
    log_prompts: bool = False

    def __post_init__(self) -> None:
        ports = [port for port in (self.port, *self.engine_ports) if port]
        for port in (self.port, *self.engine_ports):
            if not 0 <= port <= 65535:
                raise InvalidConfig(f"port {port}: expected 0 (any that is free) to 65535")
        if len(set(ports)) < len(ports):
            raise InvalidConfig(f"ports {ports}: one port for the pool and one for each engine")
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
        if self.model_root is not None and not self.model_root.is_dir():
            raise InvalidConfig(f"--model-root {self.model_root}: no such directory")

    def _check_secrets(self) -> None:
        for name, secret in (("--api-key", self.api_key), ("--admin-token", self.admin_token)):
            if secret is not None and not secret.strip():
                raise InvalidConfig(f"{name} is empty: give a secret, or leave it out")
        if not self.enable_admin:
            given = {"--admin-token": self.admin_token, "--model-root": self.model_root}
            for name, value in given.items():
                if value is not None:
                    raise InvalidConfig(f"{name} needs --enable-admin")
        elif self.admin_token is None and not is_loopback(self.host):
            raise InvalidConfig(
                f"--enable-admin with --host {self.host}: others can reach that address; give "
                f"--admin-token (or {TOKEN_VARIABLE}), or bind to 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
