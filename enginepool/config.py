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
from enginepool.sizing import rules
from enginepool.sizing.kv_size import default_fraction
from enginepool.sizing.memory import Memory, Settings
from enginepool.sizing.shape import Shape, read_shape
from enginepool.values import did_you_mean, is_int, plain, seconds, shown

Warmup = Literal["sequential", "parallel", "none"]
# The most decode steps of one launch. More would delay callers and save almost no CPU time.
MAX_DECODE_STEPS = 8
# What a call does if the queue is full.
WhenFull = Literal["block", "raise"]

_NOT_IN_A_POOL = "it is not supported in a pool"
_POOLS_OWN = "the pool sets it itself"
_ONE_ENGINE_A_DEVICE = "every engine of a pool is its own replica; use devices= for more of them"

# Refused when set to anything but upstream's default, with the reason.
REFUSED: Mapping[str, str] = {
    "model_path": "name the model as the first argument of EnginePool",
    "dp_size": _ONE_ENGINE_A_DEVICE,
    "dp_schedule_policy": _ONE_ENGINE_A_DEVICE,
    "nnodes": "a pool lives in one process on one host",
    "node_rank": "a pool lives in one process on one host",
    "dist_init_addr": "a pool lives in one process on one host",
    "device_indexes": f"{_POOLS_OWN} from devices=",
    "device": f"{_POOLS_OWN} from the platform of devices=",
    "enable_single_process": _POOLS_OWN,
    "enable_engine_loop_run_forever_daemon": _POOLS_OWN,
    "skip_tokenizer_init": "the pool tokenizes and detokenizes; pass input_ids= to give ids",
    "enable_deterministic_sampling": (
        "it is process-wide in upstream; in a pool every request has its own seed: "
        'use sampling_params["sampling_seed"]'
    ),
    "disable_precompile": 'use warmup="none"',
    "multimodal": _NOT_IN_A_POOL,
    "is_embedding": _NOT_IN_A_POOL,
    "enable_expert_balance_debug": "upstream balances experts for one engine per process",
    "enable_expert_distribution_recorder": "upstream records experts for one engine per process",
    "ep_num_redundant_experts": "upstream balances experts for one engine per process",
    "ep_dispatch_algorithm": "upstream balances experts for one engine per process",
    "init_expert_location": "upstream balances experts for one engine per process",
    "enable_precision_tracer": "upstream traces one engine per process",
    "hicache_storage": _NOT_IN_A_POOL,
    "grammar_backend": "the pool compiles grammars itself, with llguidance",
    "use_sort_for_toppk_minp": "with it upstream samples from a wrong distribution",
    "enable_mixed_chunk": "a batch that mixes prefill and decode has no log-probabilities",
    "lora_paths": "adapters are loaded once the pool is open, by load_lora_adapter",
    "lora_eviction_policy": "the slot of the adapter that was not used for longest is taken first",
    "enable_static_lora": "use enable_lora; load_lora_adapter replaces an adapter at any time",
    "lora_scaling": "load_lora_adapter takes it from the adapter's configuration",
    "allow_auto_truncate": "a pool never cuts a prompt; one that is too long is an error",
}
# The same for families of options.
REFUSED_PREFIXES: Mapping[str, str] = {
    "speculative_": "speculative decoding is not supported in a pool",
    "disaggregation_": "disaggregation is not supported in a pool",
    "pd_": "disaggregation is not supported in a pool",
}

# Environment variables of upstream that are not possible in a pool, with the reason.
REFUSED_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_JAX_AOT_DISPATCH": "it keeps old weights alive and in use after they were replaced",
    "SGLANG_PD_WEIGHT_CACHE": "it shares weights between engines on different devices",
}

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
# The linear layers that adapters can change, as upstream has them.
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PLATFORM_DEFAULTS = {
    "cpu": CPU_DEFAULTS,
    "gpu": GPU_DEFAULTS,
    "cuda": GPU_DEFAULTS,
    "tpu": rules.TPU_DEFAULTS,
}


# vLLM's names of options that have another name here.
_VLLM_NAMES = {
    "enforce_eager": 'warmup="none"',
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "max_prefill_tokens",
    "max_num_seqs": "max_running_requests",
    "seed": "random_seed",
    "tensor_parallel_size": "tp_size",
    "tokenizer": "tokenizer_path",
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
        _check_server_args(self.server_args)
        _check_lora(self.server_args)
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
        except InvalidConfig as error:  # `open()` has reported it by then
            logger().info("enginepool.model_not_read", reason=str(error))
            return {}
        check_ends(config, f"{self.model}: config.json")
        found = overrides(config, args.get("json_model_override_args"))
        return {} if found == "{}" else {"json_model_override_args": found}

    def engine_args(
        self, platform: str, free_bytes: int | None, shape: Shape | None
    ) -> dict[str, Any]:
        """The `ServerArgs` of an engine: the user's, then the platform's defaults.

        Args:
            shape: The model's shape, if the platform is TPU and the shape is known.
        """
        fields = _server_args_fields()
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
        """The memory that such an engine takes of a chip. None if it is not known."""
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


_LORA = ("max_lora_rank", "lora_target_modules")


def _check_lora(args: Mapping[str, Any]) -> None:
    defaults = _server_args_fields()
    given = {name: args[name] for name in args if "lora" in name and args[name] != defaults[name]}
    if not given.pop("enable_lora", False):
        if given:
            name = next(iter(given))
            raise InvalidConfig(f"{name}={shown(given[name])} without enable_lora=True")
        return
    if missing := [name for name in _LORA if name not in given]:
        raise InvalidConfig(f"enable_lora=True needs {' and '.join(missing)} as well")
    for name in ("max_lora_rank", "max_loras_per_batch", "max_loaded_loras"):
        if name in given and not (is_int(given[name]) and given[name] > 0):
            raise InvalidConfig(f"{name}={shown(given[name])}: expected a count, 1 or more")
    targets = given["lora_target_modules"]
    known = (*_TARGETS, "all")
    if not isinstance(targets, list | tuple | set) or not targets or set(targets) - set(known):
        raise InvalidConfig(
            f"lora_target_modules={shown(targets)}: expected a list of {', '.join(known)}"
        )


def server_args_class() -> Any:
    """Upstream's class `ServerArgs`. Its import changes `os.environ`; these changes are undone."""
    from enginepool.process.guest import restore_environ

    environ = dict(os.environ)
    try:
        from sgl_jax.srt.server_args import ServerArgs
    finally:
        restore_environ(environ)
    return ServerArgs


def _server_args_fields() -> dict[str, Any]:
    """Upstream's options and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(server_args_class())}


def _check_server_args(server_args: Mapping[str, Any]) -> None:
    fields = _server_args_fields()
    own = [f.name for f in dataclasses.fields(PoolConfig) if f.name != "server_args"]
    for name, value in server_args.items():
        if name not in fields:
            hint = did_you_mean(name, [*own, *fields], elsewhere=_VLLM_NAMES)
            raise InvalidConfig(f"unknown option {name}={shown(value)}{hint}")
        reason = REFUSED.get(name) or next(
            (why for prefix, why in REFUSED_PREFIXES.items() if name.startswith(prefix)), None
        )
        if name == "disable_overlap_schedule":
            if value is not True:
                raise InvalidConfig(
                    f"{name}={shown(value)}: the overlap schedule runs the forward on a second "
                    "thread, and a pool needs step boundaries; leave the option out"
                )
        elif reason is not None and (name in ("model_path", "device") or value != fields[name]):
            raise InvalidConfig(f"{name}={shown(value)}: {reason}")
