"""The options of a pool: its own, and upstream's `ServerArgs`, checked by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from enginepool.errors import InvalidConfig
from enginepool.logs import logger
from enginepool.model_config.config_json import fields as read_fields
from enginepool.model_config.config_json import overrides, written
from enginepool.model_config.generation import check_ends
from enginepool.model_config.unsupported import refuse
from enginepool.server_args import (
    REFUSED_ENVIRONMENT,
    check_lora,
    check_server_args,
    server_args_fields,
)
from enginepool.sizing import rules
from enginepool.sizing.kv_size import default_fraction
from enginepool.sizing.memory import Memory
from enginepool.sizing.settings import Settings
from enginepool.sizing.shape import Shape, read_shape
from enginepool.values import is_int, plain, seconds, shown

Warmup = Literal["sequential", "parallel", "none"]
# The most decode steps of one launch. More would delay callers and save almost no CPU time.
MAX_DECODE_STEPS = 8
# What a call does if the queue is full.
WhenFull = Literal["block", "raise"]

# Needed on CPU. Upstream's native attention copies the whole KV pool in every layer and step, so
# the pool is small. A separate pool for sliding windows makes Gemma's first forward fail.
CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "native",
    "disable_hybrid_swa_memory": True,
    "max_total_tokens": 1024,
    "max_running_requests": 8,
    "max_prefill_tokens": 256,
    "chunked_prefill_size": 256,
    "precompile_token_paddings": [64, 256],
    "precompile_bs_paddings": [1, 8],
}
GPU_DEFAULTS: Mapping[str, Any] = {"attention_backend": "native"}
_PLATFORM_DEFAULTS = {
    "cpu": CPU_DEFAULTS,
    "gpu": GPU_DEFAULTS,
    "cuda": GPU_DEFAULTS,
    "tpu": rules.TPU_DEFAULTS,
}


@dataclass(frozen=True)
class PoolConfig:
    """The arguments of `EnginePool`, checked as far as that is possible without a device."""

    model: str
    devices: int | Sequence[Any] | None = None
    tp_size: int = 1
    warmup: Warmup = "sequential"
    restart: bool = True
    max_restarts: int = 5
    step_timeout: float | None = 300.0
    max_decode_steps: int = MAX_DECODE_STEPS
    max_queued: int | None = None
    when_full: WhenFull = "block"
    tune_host: bool = False
    progress: bool = True
    server_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for own in dataclasses.fields(self):  # NumPy and JAX values become plain Python
            object.__setattr__(self, own.name, plain(getattr(self, own.name)))
        given = {name: plain(value) for name, value in self.server_args.items()}
        object.__setattr__(self, "server_args", given)
        self._require("restart", isinstance(self.restart, bool), "True or False")
        self._require("tune_host", isinstance(self.tune_host, bool), "True or False")
        self._require("progress", isinstance(self.progress, bool), "True or False")
        if isinstance(self.devices, str):
            raise InvalidConfig(
                f"devices={shown(self.devices)}: expected a count, a list of device ids, or None "
                "for all"
            )
        self._require_one_of("warmup", get_args(Warmup))
        self._require_one_of("when_full", get_args(WhenFull))
        self._require_count("tp_size", 1, "a count of devices, 1 or more")
        self._require_count("max_restarts", 0, "a count, 0 or more")
        self._require(
            "max_decode_steps",
            is_int(self.max_decode_steps) and 1 <= self.max_decode_steps <= MAX_DECODE_STEPS,
            f"a count from 1 to {MAX_DECODE_STEPS}; 1 for decode steps one by one",
        )
        if self.max_queued is not None:
            self._require_count("max_queued", 1, "a count, or None for no limit")
        seconds("step_timeout", self.step_timeout, error=InvalidConfig)
        own = [each.name for each in dataclasses.fields(self) if each.name != "server_args"]
        check_server_args(self.server_args, own)
        check_lora(self.server_args)
        for name, reason in REFUSED_ENVIRONMENT.items():
            if os.environ.get(name, "0") not in ("", "0"):
                raise InvalidConfig(
                    f"environment variable {name}={os.environ[name]!r}: {reason}; unset it"
                )

    def _require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise InvalidConfig(f"{name}={shown(getattr(self, name))}: expected {expected}")

    def _require_one_of(self, name: str, allowed: Sequence[str]) -> None:
        value = getattr(self, name)
        fits = isinstance(value, str) and value in allowed
        self._require(name, fits, f"one of {', '.join(allowed)}")

    def _require_count(self, name: str, least: int, expected: str) -> None:
        value = getattr(self, name)
        self._require(name, is_int(value) and value >= least, expected)

    def for_engine(
        self, platform: str, device_indexes: list[int], free_bytes: int | None = None
    ) -> dict[str, Any]:
        """`ServerArgs` of one engine.

        Args:
            device_indexes: The engine's devices as offsets from the host's smallest device id.
                Upstream asks these devices for free memory.
            free_bytes: The free memory of each of the engine's devices. None if it is not known.
        """
        shape = self.shape if platform == "tpu" and free_bytes else None
        return {
            **self.engine_args(platform, free_bytes, shape),
            "model_path": self.model,
            "device": platform,
            "device_indexes": device_indexes,
            "enable_single_process": True,
            "disable_overlap_schedule": True,  # it runs the forward on a second thread
            "disable_precompile": True,  # the pool does its own warm-up
            **self._model_overrides,
        }

    @cached_property
    def written(self) -> dict[str, Any]:
        """The model's config.json, read from the same place as upstream's engines read it.

        Raises:
            InvalidConfig: There is none.
        """
        return written(self.model, self.server_args.get("revision"))

    def check_model(self) -> None:
        """Refuse a model if its configuration asks for something that the engines do not compute.

        Raises:
            InvalidConfig: The error names the field and its value. Or there is no configuration.
        """
        refuse(read_fields(self.written, self.server_args.get("json_model_override_args")))

    @cached_property
    def _model_overrides(self) -> dict[str, str]:
        """The overrides with which upstream reads this config.json correctly."""
        args = self.server_args
        try:
            config = self.written
        except InvalidConfig as error:  # `open()` reports it
            logger().info("enginepool.model_not_read", reason=str(error))
            return {}
        check_ends(config, f"{self.model}: config.json")
        found = overrides(config, args.get("json_model_override_args"))
        return {} if found == "{}" else {"json_model_override_args": found}

    def engine_args(
        self, platform: str, free_bytes: int | None, shape: Shape | None
    ) -> dict[str, Any]:
        """The `ServerArgs` of an engine: the platform's defaults, overridden by the user's options.

        Args:
            shape: The model's shape, if the platform is TPU and the shape is known.
        """
        fields = server_args_fields()
        defaults = _PLATFORM_DEFAULTS.get(platform, {})
        args = {
            **{name: value for name, value in defaults.items() if name in fields},
            "log_level": "error",
            "grammar_backend": "none",  # see engine/grammar.py
            **self.server_args,
            "tp_size": self.tp_size,
        }
        if shape is not None and free_bytes and args.get("mem_fraction_static") is None:
            args["mem_fraction_static"] = default_fraction(shape, args, free_bytes)
        return args

    def tpu_memory(self, args: Mapping[str, Any], free_bytes: int | None) -> Memory | None:
        """How an engine of this pool uses the memory of a chip. None if it is not known."""
        if not free_bytes or self.shape is None:
            return None
        return Memory(self.shape, Settings.of(args, self.shape), free_bytes)

    def tpu_advice(self, args: Mapping[str, Any], free_bytes: int | None) -> list[rules.Advice]:
        """Problems of an engine with these `ServerArgs` on a TPU, before it is built."""
        memory = self.tpu_memory(args, free_bytes)
        if memory is None:
            return rules.page_advice(self.server_args)
        return rules.advice(memory, self.server_args)

    @cached_property
    def shape(self) -> Shape | None:
        """The sizes of the model. None if they cannot be read, which is logged."""
        try:
            return read_shape(self.model, self.server_args)
        except InvalidConfig as error:
            logger().info("enginepool.model_not_sized", reason=str(error))
            return None
