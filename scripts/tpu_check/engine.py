"""The engine to compile: the configuration of a model, and sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginepool.doctor.ahead_of_time.programs import pool_config
from enginepool.errors import InvalidConfig
from enginepool.sizing.chips import Topology
from enginepool.sizing.rules import page_advice, what_fails
from enginepool.values import did_you_mean

_FOLDER = Path(__file__).parents[2] / "enginepool" / "doctor" / "models"
MODELS = sorted(file.stem for file in _FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Sizes:
    """The options of an engine that decide the shapes of its programs."""

    batch: int = 64
    prefill: int = 512
    context: int = 4096
    page_size: int = 128
    mem_fraction_static: float | None = None
    lora_rank: int = 0
    quantization: str | None = None

    def server_args(self) -> dict[str, Any]:
        fraction = self.mem_fraction_static
        return {
            "page_size": self.page_size,
            "context_length": self.context,
            "max_running_requests": self.batch,
            "chunked_prefill_size": self.prefill,
            "max_prefill_tokens": self.prefill,
            "precompile_bs_paddings": [self.batch],
            "precompile_token_paddings": [self.prefill],
            "quantization_config_path": self.quantization,
            **({} if fraction is None else {"mem_fraction_static": fraction}),
            **(self._adapters() if self.lora_rank else {}),
        }

    def _adapters(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_lora_rank": self.lora_rank,
            "lora_target_modules": ["all"],
        }


def model_config(name: str, layers: int | None) -> dict[str, Any]:
    """The configuration of a model from the list or from a folder, cut to so many layers.

    Raises:
        InvalidConfig: There is none.
    """
    path = _FOLDER / f"{name}.json" if name in MODELS else Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = did_you_mean(name, MODELS)
        raise InvalidConfig(
            f"model={name!r}: neither a config.json ({error}) nor one of {', '.join(MODELS)}" + hint
        ) from None
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def refuse_what_fails(host: Topology, config: dict[str, Any], sizes: Sizes) -> None:
    """Check the sizes without compiling, by the rules of docs/tpu.md.

    Raises:
        InvalidConfig: No engine can serve on this host with this page size, memory fraction or
            batch.
    """
    with pool_config(config, 1, sizes.server_args()) as pool:
        hbm_bytes = host.chip.hbm_bytes
        memory = pool.tpu_memory(pool.for_engine("tpu", [0], hbm_bytes), hbm_bytes)
        given = pool.server_args
        found = page_advice(given) if memory is None else what_fails(memory, given)
    if found:
        said = "; ".join(f"{entry.problem}: {entry.remedy}" for entry in found)
        raise InvalidConfig(f"{host.name}, not compiled: {said}")
