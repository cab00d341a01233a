"""Upstream's `ServerArgs`: its options, and which of them a pool refuses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.values import did_you_mean, is_int, shown

_NOT_IN_A_POOL = "it is not supported in a pool"
_POOLS_OWN = "the pool sets it itself"
_ENGINES_ARE_REPLICAS = "each engine of a pool is a replica; use devices= for more engines"

# Refused when set to anything but upstream's default, with the reason.
REFUSED: Mapping[str, str] = {
    "model_path": "name the model as the first argument of EnginePool",
    "dp_size": _ENGINES_ARE_REPLICAS,
    "dp_schedule_policy": _ENGINES_ARE_REPLICAS,
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
    "lora_eviction_policy": "a pool evicts the least recently used adapter first",
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

# The linear layers that adapters can change, as upstream has them.
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LORA = ("max_lora_rank", "lora_target_modules")
# Upstream lists fp8 as well, and fails while it makes an engine.
_KV_DTYPES = ("auto", "bf16")
_COUNTS = ("model_layer_nums",)
_LISTS_OF_COUNTS = ("precompile_token_paddings", "precompile_bs_paddings")


def check_lora(args: Mapping[str, Any]) -> None:
    """Check the options of adapters.

    Raises:
        InvalidConfig: An option is missing or invalid.
    """
    defaults = server_args_fields()
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
    if (path := args.get("quantization_config_path")) is not None:
        raise InvalidConfig(
            f"quantization_config_path={shown(path)} beside enable_lora=True: upstream has no LoRA "
            "for quantized layers; leave one of them out"
        )
    targets = given["lora_target_modules"]
    known = (*_TARGETS, "all")
    listed = isinstance(targets, list | tuple | set) and targets
    if not listed or any(target not in known for target in targets):
        raise InvalidConfig(
            f"lora_target_modules={shown(targets)}: expected a list of {', '.join(known)}"
        )


def server_args_class() -> Any:
    """Upstream's class `ServerArgs`. Its import changes `os.environ`; these changes are undone."""
    from enginepool.process.host_state import restore_environ

    environ = dict(os.environ)
    try:
        from sgl_jax.srt.server_args import ServerArgs
    finally:
        restore_environ(environ)
    return ServerArgs


def server_args_fields() -> dict[str, Any]:
    """Upstream's options and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(server_args_class())}


def check_server_args(server_args: Mapping[str, Any], own: Sequence[str]) -> None:
    """Refuse options that upstream does not have or that are not possible in a pool.

    Args:
        own: The names of the pool's own options, for hints.

    Raises:
        InvalidConfig: The error names the option and its value.
    """
    fields = server_args_fields()
    for name, value in server_args.items():
        if name not in fields:
            hint = did_you_mean(name, [*own, *fields], elsewhere=_VLLM_NAMES)
            raise InvalidConfig(f"unknown option {name}={shown(value)}{hint}")
        reason = REFUSED.get(name) or next(
            (why for prefix, why in REFUSED_PREFIXES.items() if name.startswith(prefix)), None
        )
        if name == "kv_cache_dtype" and value not in _KV_DTYPES:
            raise InvalidConfig(
                f"{name}={shown(value)}: upstream has no such KV cache; expected one of "
                f"{', '.join(_KV_DTYPES)}"
            )
        _check_counts(name, value)
        if name == "disable_overlap_schedule":
            if value is not True:
                raise InvalidConfig(
                    f"{name}={shown(value)}: the overlap schedule runs the forward on a second "
                    "thread, and a pool needs step boundaries; leave the option out"
                )
        elif reason is not None and (name in ("model_path", "device") or value != fields[name]):
            raise InvalidConfig(f"{name}={shown(value)}: {reason}")


def _check_counts(name: str, value: Any) -> None:
    if value is None:
        return
    if name in _COUNTS and not _is_count(value):
        raise InvalidConfig(f"{name}={shown(value)}: expected a count, 1 or more")
    if name in _LISTS_OF_COUNTS and not (
        isinstance(value, list | tuple) and all(map(_is_count, value))
    ):
        raise InvalidConfig(f"{name}={shown(value)}: expected a list of counts, 1 or more")


def _is_count(value: Any) -> bool:
    return is_int(value) and value > 0
