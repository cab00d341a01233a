"""The options of `update_weights`, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from enginepool.errors import InvalidRequest
from enginepool.runtime.quiesce import SWAP_MODES, SwapMode
from enginepool.values import plain

Strategy = Literal["atomic", "rolling"]
Staging = Literal["auto", "double", "stream"]


@dataclass(frozen=True)
class Options:
    """How to update; see `EnginePool.update_weights`."""

    weight_version: int | str | None = None
    mode: SwapMode = "drain"
    strategy: Strategy = "atomic"
    staging: Staging = "auto"
    strict: bool = True
    copy: bool = False
    free_kv: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_version", plain(self.weight_version))

    def check(self) -> None:
        """Raise InvalidRequest for an unknown value, or for options that exclude each other."""
        for name, allowed in (
            ("mode", SWAP_MODES),
            ("strategy", get_args(Strategy)),
            ("staging", get_args(Staging)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise InvalidRequest(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        version = self.weight_version
        if version is not None and (
            isinstance(version, bool) or not isinstance(version, int | str)
        ):
            raise InvalidRequest(f"weight_version={version!r}: expected an int or a str")
        if self.strategy == "rolling" and self.mode not in ("drain", "abort"):
            raise InvalidRequest(
                f"strategy='rolling' with mode={self.mode!r}: an output would mix versions; "
                "use mode='drain' or 'abort'"
            )
        if self.free_kv and self.mode == "in_place":
            raise InvalidRequest("free_kv=True with mode='in_place': running requests need the KV")
