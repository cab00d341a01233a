"""The options that decide how much memory an engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.sizing.shape import Shape
from enginepool.values import is_int, is_number, shown

# Upstream's defaults (ServerArgs.__post_init__, common_utils.PRECOMPILE_DEFAULT_*).
FRACTION = 0.88
CHUNK = 4096
LORA_SLOTS = 8
TOKEN_PADDINGS = tuple(1 << i for i in range(6, 14))
BATCH_PADDINGS = tuple(1 << i for i in range(9))


@dataclass(frozen=True)
class Settings:
    """The part of `ServerArgs` that decides how much memory an engine takes.

    Attributes:
        max_running_requests, max_total_tokens: None if upstream chooses.
        hybrid_swa: Whether layers with a sliding window have a KV pool of their own. Then decode is
            not steady.
        lora_targets: The layers that adapters change; none without adapters.
        lora_rank, lora_slots: How wide a slot for an adapter is, and how many there are.
    """

    context: int
    page_size: int
    fraction: float
    tp_size: int = 1
    chunk: int = CHUNK
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    kv_itemsize: int | None = None
    token_paddings: tuple[int, ...] = TOKEN_PADDINGS
    batch_paddings: tuple[int, ...] = BATCH_PADDINGS
    hybrid_swa: bool = True
    lora_targets: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_slots: int = 0

    @classmethod
    def of(cls, args: Mapping[str, Any], shape: Shape) -> Settings:
        """Read settings from `ServerArgs` as a pool passes them. Missing options have upstream's
        default.

        Raises:
            InvalidConfig: Upstream could not compute with a value.
        """
        given = {name: value for name, value in args.items() if value is not None}
        for name in _COUNTS & given.keys():
            chunks = name == "chunked_prefill_size"
            if not is_int(given[name]) or given[name] < (-1 if chunks else 1):
                expected = "a count, or -1 for no chunks" if chunks else "a count, 1 or more"
                raise InvalidConfig(f"{name}={shown(given[name])}: expected {expected}")
        fraction = given.get("mem_fraction_static", FRACTION)
        if not is_number(fraction) or not 0 < fraction < 1:
            raise InvalidConfig(
                f"mem_fraction_static={shown(fraction)}: expected a number above 0 and below 1"
            )
        most = given.get("max_prefill_tokens", 16384)
        chunk = given.get("chunked_prefill_size", CHUNK)
        return cls(
            context=given.get("context_length", shape.context),
            page_size=given.get("page_size", 1),
            fraction=float(fraction),
            tp_size=given.get("tp_size", 1),
            chunk=min(chunk, most) if chunk > 0 else most,
            max_running_requests=given.get("max_running_requests"),
            max_total_tokens=given.get("max_total_tokens"),
            kv_itemsize=2 if given.get("kv_cache_dtype", "auto") == "bf16" else None,
            token_paddings=tuple(given.get("precompile_token_paddings", TOKEN_PADDINGS)),
            batch_paddings=tuple(given.get("precompile_bs_paddings", BATCH_PADDINGS)),
            hybrid_swa=not given.get("disable_hybrid_swa_memory"),
            **_lora(given),
        )

    @property
    def pages_per_request(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def tokens_per_request(self) -> int:
        """KV tokens of a request that fills its context, in whole pages."""
        return self.pages_per_request * self.page_size


def _lora(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given.get("enable_lora"):
        return {}
    return {
        "lora_targets": tuple(given["lora_target_modules"]),
        "lora_rank": given["max_lora_rank"],
        "lora_slots": given.get("max_loras_per_batch", LORA_SLOTS),
    }


_COUNTS = {
    *("context_length", "page_size", "tp_size", "max_prefill_tokens", "chunked_prefill_size"),
    *("max_running_requests", "max_total_tokens"),
}
