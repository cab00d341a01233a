"""The calls that load and unload adapters. Each has an async twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.frontend.cancellation import async_twin
from enginepool.pool.calls import CallGroup
from enginepool.runtime.adapters import AdapterReport, load_adapter, unload_adapter
from enginepool.runtime.quiesce import SwapMode
from enginepool.runtime.staged_adapter import StagedAdapter, stage_adapter


class AdapterCalls(CallGroup):
    """Mixin of `EnginePool`: LoRA adapters, of a pool with `enable_lora=True`. Thread-safe."""

    def load_lora_adapter(
        self,
        lora_name: str,
        source: Any,
        *,
        config_dict: Mapping[str, Any] | None = None,
        weight_version: int | str | None = None,
        mode: SwapMode = "drain",
    ) -> AdapterReport:
        """Load an adapter, or replace one of the same name. If anything is wrong, nothing changes.

        Every engine has `max_loras_per_batch` slots on its device. It loads an adapter into a slot
        when a request asks for that adapter. The pool keeps all adapters on the host. An update of
        the base weights does not change the adapters.

        Args:
            lora_name: What `lora_path` names in calls.
            source: A PEFT folder or hub id, or a dict from PEFT's names to NumPy, JAX or torch
                arrays. It is copied.
            config_dict: The fields of adapter_config.json, if `source` is a dict: `r`,
                `lora_alpha` and, if they are used, `use_rslora`, `rank_pattern` and
                `alpha_pattern`. None: the fields of the previous version. A folder has its own.
            weight_version: The label in `meta_info["lora_versions"]`. None: a number that no
                other version of any adapter has.
            mode: What happens to running requests of the previous version. "drain": they finish on
                the previous version, while new requests run on the new one. No request waits.
                "abort": they end with the tokens that they have. "in_place": they continue on the
                new version, with the KV of the previous one. "retract": all running requests of
                the pool go back to the queue, and compute their KV again.

        Raises:
            InvalidWeights: The source does not fit, or needs more than plain LoRA.
            InvalidRequest: The pool takes no adapters, or `max_loaded_loras` are loaded.
            WeightUpdateFailed, PoolClosed, PoolFailed: As `update_weights`.
        """
        return load_adapter(self.runtime, lora_name, source, config_dict, weight_version, mode)

    def stage_lora_adapter(
        self,
        lora_name: str,
        source: Any,
        *,
        config_dict: Mapping[str, Any] | None = None,
        weight_version: int | str | None = None,
    ) -> StagedAdapter:
        """Read an adapter and put it on every device, to commit it later.

        This is the first half of `load_lora_adapter`. It is for a program that commits only when
        all hosts have the adapter. Arguments and errors are those of `load_lora_adapter`.
        """
        return stage_adapter(self.runtime, lora_name, source, config_dict, weight_version)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Remove an adapter. Earlier calls still finish with it.

        Raises:
            InvalidRequest: No adapter has this name.
        """
        unload_adapter(self.runtime, lora_name)

    async_load_lora_adapter = async_twin(load_lora_adapter)
    async_stage_lora_adapter = async_twin(stage_lora_adapter)
    async_unload_lora_adapter = async_twin(unload_lora_adapter)
