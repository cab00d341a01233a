"""Fields of OpenAI's, vLLM's and sglang's servers, for the routes that do not know them.

Such a route ignores a field that has its default value. It refuses any other value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# The defaults by name. Null is accepted, too.
_DEFAULTS: Mapping[str, Collection[Any]] = {
    # OpenAI's
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    # sglang's
    "log_metrics": (True,),
    "token_step": (0,),
}
# Fields whose default is an empty value. Under any other unknown name, which may be misspelt, an
# empty value is refused.
_NAMES = frozenset(
    (
        *("audio", "background", "functions", "max_tool_calls", "prediction", "reasoning"),
        *("reasoning_effort", "store", "suffix", "web_search_options"),
        *("allowed_token_ids", "bad_words", "chat_template", "documents", "early_stopping", "echo"),
        *("enable_response_messages", "extra_args", "flat_logprobs", "guided_choice"),
        *("guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
        *("include_stop_str_in_output", "kv_transfer_params", "logit_bias", "logits_processors"),
        *("mm_processor_kwargs", "prompt_embeds", "skip_reading_prefix_cache", "tools"),
        *("truncate_prompt_tokens", "use_beam_search", "vllm_xargs"),
        *("custom_logit_processor", "custom_params", "lora_path", "need_wait_for_mm_inputs"),
        *("no_logs", "recapture_cuda_graph", "require_reasoning", "return_bytes"),
        *("return_cached_tokens_details", "return_entropy", "return_hidden_states"),
        *("return_indexer_topk", "return_meta_info", "return_prompt_token_ids"),
        *("return_routed_experts", "session_params", "stop_regex", "use_audio_in_video"),
    )
)


def has_default(name: str, value: Any) -> bool:
    if name in _DEFAULTS:
        return value is None or value in _DEFAULTS[name]
    return name in _NAMES and is_empty(value)


def is_empty(value: Any) -> bool:
    """Whether a value is null, false, an empty text or list, or an object of such values."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or value is False or value in ("", [])


def without_defaults(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters, without null values and without unknown fields that have their default."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name in known or not has_default(name, value))
    }
