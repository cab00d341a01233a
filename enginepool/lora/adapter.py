"""One version of one adapter, and the pool's adapters by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginepool.errors import InvalidRequest
from enginepool.values import shown

# The slot of a row without an adapter.
NO_SLOT = -1


@dataclass(eq=False)
class Adapter:
    """One version of an adapter, on the host. Requests that use it hold a reference.

    Attributes:
        version: The label that results carry.
        number: No other version of any adapter of the pool has it. Prefix-cache entries of
            different numbers are separate.
        scale: The factor of the product of B and A.
        config: The fields of adapter_config.json.
        arrays: A `[rank, in]` and B `[out, rank]`, by the path of the linear layer.
        source: The folder or hub id that it came from; None for arrays.
        line: A version that replaces another one belongs to the same line. This is the `number` of
            the line's first version. After an unload, the next adapter of the name begins a new
            line.
        successor: The version that has replaced this one under running requests, if any.
    """

    name: str
    version: int | str
    number: int
    scale: float
    config: Mapping[str, Any]
    arrays: Mapping[str, tuple[np.ndarray, np.ndarray]]
    source: str | None = None
    line: int = 0
    successor: Adapter | None = None

    @property
    def rank(self) -> int:
        return max(len(a) for a, _ in self.arrays.values())

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.arrays.values())

    @property
    def latest(self) -> Adapter:
        """The version that a running request continues with: this one, or its latest successor."""
        adapter = self
        while adapter.successor is not None:
            adapter = adapter.successor
        return adapter


class Adapters:
    """The adapters of a pool. Thread-safe.

    Attributes:
        enabled: Whether the pool takes adapters.
        most: How many can be loaded at a time; None for no limit.
    """

    def __init__(self, *, enabled: bool = False, most: int | None = None) -> None:
        self.enabled = enabled
        self.most = most
        self._lock = threading.Lock()
        self._by_name: dict[str, Adapter] = {}
        self._numbers = 0

    def names(self) -> list[str]:
        return list(self._all())

    def loaded(self) -> list[Adapter]:
        return list(self._all().values())

    def _all(self) -> dict[str, Adapter]:
        with self._lock:
            return dict(self._by_name)

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def find(self, name: Any, argument: str = "lora_path") -> Adapter:
        """The adapter that a call names.

        Raises:
            InvalidRequest: There is none of that name.
        """
        self.check_enabled(name, argument)
        if not isinstance(name, str) or (adapter := self._by_name.get(name)) is None:
            loaded = ", ".join(self.names()) or "none"
            raise InvalidRequest(
                f"{argument}={shown(name)}: no such adapter; loaded: {loaded}; load_lora_adapter "
                "loads one"
            )
        return adapter

    def check_enabled(self, name: Any, argument: str) -> None:
        """Raise InvalidRequest if the pool was opened without adapters."""
        if not self.enabled:
            raise InvalidRequest(
                f"{argument}={shown(name)}: this pool takes no adapters; open it with "
                "enable_lora=True, max_lora_rank= and lora_target_modules="
            )

    def check_room(self, name: str) -> None:
        """Raise InvalidRequest if another adapter would be one too many."""
        names = self.names()
        if self.most is not None and name not in names and len(names) >= self.most:
            raise InvalidRequest(
                f"lora_name={name!r}: {len(names)} adapters are loaded (max_loaded_loras="
                f"{self.most}): unload_lora_adapter one of {', '.join(names)}"
            )

    def next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def set(self, adapter: Adapter) -> None:
        """Give this version to later calls that name the adapter."""
        with self._lock:
            self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Forget an adapter. Requests that have it keep it."""
        adapter = self.find(name, "lora_name")
        with self._lock:
            self._by_name.pop(name, None)
        return adapter

    def for_start(self, adapter: Adapter | None, *, begun: bool) -> Adapter | None:
        """The version with which a waiting request starts. A request that has begun keeps its
        version or the latest successor. Other requests get the newest version of the name. If their
        adapter was unloaded, they keep theirs, even if the name is in use again."""
        if adapter is None:
            return None
        newest = None if begun else self._by_name.get(adapter.name)
        return newest if newest is not None and newest.line == adapter.line else adapter.latest
