"""The options of `update_weights`, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from enginepool.errors import InvalidRequest
from enginepool.runtime.quiesce import SWAP_MODES, SwapMode
from enginepool.values import flag, is_int, plain, shown

Strategy = Literal["atomic", "rolling"]
Staging = Literal["auto", "double", "stream"]


@dataclass(frozen=True)
class Options:
    """How to update; see `EnginePool.update_weights`.

    Raises:
        InvalidRequest: A value is unknown, or two options exclude each other.
    """

    weight_version: int | str | None = None
    mode: SwapMode = "drain"
    strategy: Strategy = "atomic"
    staging: Staging = "auto"
    strict: bool = True
    copy: bool = False
    free_kv: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", SWAP_MODES),
            ("strategy", get_args(Strategy)),
            ("staging", get_args(Staging)),
        ):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in allowed):
                raise InvalidRequest(f"{name}={shown(value)}: expected one of {', '.join(allowed)}")
        for name, default in (("strict", True), ("copy", False), ("free_kv", False)):
            object.__setattr__(self, name, flag(name, getattr(self, name), default))
        version = plain(self.weight_version)
        if not (version is None or is_int(version) or isinstance(version, str)):
            raise InvalidRequest(f"weight_version={shown(version)}: expected an int or a str")
        object.__setattr__(self, "weight_version", version)
        if self.strategy == "rolling" and self.mode not in ("drain", "abort"):
            raise InvalidRequest(
                f"strategy='rolling' with mode={self.mode!r}: an output would mix versions; "
                "use mode='drain' or 'abort'"
            )
        if self.free_kv and self.mode == "in_place":
            raise InvalidRequest("free_kv=True with mode='in_place': running requests need the KV")
