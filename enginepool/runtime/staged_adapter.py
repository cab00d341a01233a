"""An adapter that is staged on every device and waits for its commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.errors import StaleWeights
from enginepool.frontend.cancellation import async_twin
from enginepool.runtime.adapters import AdapterLoad, AdapterReport, check_load
from enginepool.runtime.quiesce import SwapMode
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.swap_options import Options
from enginepool.runtime.update_lock import updating


class StagedAdapter:
    """A version of an adapter on every device, beside the slots. Thread-safe.

    Attributes:
        lora_name: What `lora_path` names in calls.
        weight_version: The label that results carry in `lora_versions` once it is committed.
    """

    def __init__(self, runtime: Runtime, load: AdapterLoad) -> None:
        self.lora_name, self.weight_version = load.new.name, load.new.version
        self._runtime = runtime
        self._load: AdapterLoad | None = load

    def commit(self, mode: SwapMode = "drain") -> AdapterReport:
        """Load it on every engine. If anything is wrong, no engine loads it, and it stays staged.

        Raises:
            StaleWeights: It was committed or discarded.
            WeightUpdateFailed, InvalidRequest, PoolClosed, PoolFailed: As `load_lora_adapter`.
        """
        options = Options(mode=mode)
        with updating(self._runtime, "commit()") as workers:
            load = self._load  # read once: another thread may discard it
            if load is None:
                raise StaleWeights(
                    f"{self.lora_name!r} of version {self.weight_version!r} cannot be committed: "
                    "it was committed or discarded already"
                )
            report = load.commit(workers, options.mode)
            self.discard()
        return report

    def discard(self) -> None:
        """Forget it. Does nothing if it is committed."""
        self._load = None

    async_commit = async_twin(commit)
    async_discard = async_twin(discard)


def stage_adapter(
    runtime: Runtime,
    name: str,
    source: Any,
    config: Mapping[str, Any] | None,
    weight_version: int | str | None,
) -> StagedAdapter:
    """See `EnginePool.stage_lora_adapter`."""
    options = Options(weight_version)
    check_load(runtime, name)
    with updating(runtime, "stage_lora_adapter()") as workers:
        load = AdapterLoad(runtime, workers, name)
        load.stage(source, config, options.weight_version)
        return StagedAdapter(runtime, load)
