"""The sampling parameters of a call that gives none. They come from generation_config.json.

The pool takes the fields that upstream's `Engine.get_default_sampling_params` takes, and also
`min_new_tokens` and `stop_strings`. If a field would change the output and engines do not compute
it, calls that need the defaults are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.model_config.generation import NAME, written_generation
from enginepool.values import json_object, shown

_OPTION = "preferred_sampling_params"
# The sampling parameter of each field.
_TAKEN = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
    **{name: name for name in ("max_new_tokens", "min_new_tokens")},
    "stop_strings": "stop",
}
# Fields that can change the output of transformers, each with the values that change nothing.
_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty"), ({}, [])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
}


class GenerationDefaults:
    """The default sampling parameters of one pool.

    Attributes:
        params: Sampling parameters by name, not checked yet.
    """

    def __init__(self, params: Mapping[str, Any], refused: Mapping[str, Any], origin: str) -> None:
        """
        Args:
            refused: The fields of generation_config.json that the engines do not compute.
            origin: Where the parameters come from, for errors.
        """
        self.params = dict(params)
        self._refused = dict(refused)
        self._origin = origin

    @classmethod
    def read(
        cls, model: str, revision: str | None = None, preferred: str | None = None
    ) -> GenerationDefaults:
        """
        Args:
            preferred: Upstream's `preferred_sampling_params`, which override the file's.

        Raises:
            InvalidConfig: One of them cannot be read.
        """
        return cls.of(written_generation(model, revision), json_object(_OPTION, preferred))

    @classmethod
    def of(cls, fields: Mapping[str, Any], preferred: Mapping[str, Any]) -> GenerationDefaults:
        """Read the defaults from the fields of a generation_config.json. `do_sample=false` means
        greedy."""
        given = {_TAKEN[name]: value for name, value in fields.items() if name in _TAKEN}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_k") == 0:  # transformers' "all"
            given["top_k"] = -1
        if fields.get("do_sample") is False:
            given["temperature"] = 0.0
        refused = {
            name: fields[name]
            for name, neutral in _NOT_COMPUTED.items()
            if fields.get(name) is not None and fields[name] not in neutral
        }
        refused = {name: value for name, value in refused.items() if name not in preferred}
        origin = f"{NAME} or {_OPTION}" if preferred else NAME
        return cls({**given, **preferred}, refused, origin)

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: The checkpoint has a field that the engines do not compute.
        """
        for name, value in self._refused.items():
            raise self.refusal(f"{name}={shown(value)}: sglang-jax does not compute it")

    def refusal(self, why: object) -> InvalidRequest:
        """The error of a call that cannot start with the checkpoint's parameters."""
        return InvalidRequest(
            f"the call has no sampling_params, and those of {self._origin} do not work: {why}; "
            f"pass sampling_params to the call ({{}} ignores the checkpoint's), or {_OPTION} to "
            "the pool"
        )
