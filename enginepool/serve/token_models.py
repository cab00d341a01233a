"""Bodies and replies of vLLM's routes for token ids."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from enginepool.dispatch.request import MAX_TOP_LOGPROBS
from enginepool.serve.answer_form import StructuredOutputs
from enginepool.serve.default_only import without_defaults
from enginepool.serve.openai_models import MaskRows, PromptLogprobs, ToolBody, Turn
from enginepool.serve.unknown_fields import KnownFieldsOnly, unknown
from enginepool.values import did_you_mean


class TokenSampling(KnownFieldsOnly):
    """vLLM's SamplingParams, as far as a pool has them. `detokenize` and `output_kind` change
    nothing: replies have ids and no text, and chunks have new ids only. `return_sampling_mask` and
    `return_routed_experts` are fields of ours; vLLM has options of its engine instead.
    `routed_experts_prompt_start` is accepted without `return_routed_experts`, because the client
    `verifiers` sends it with every turn but the first."""

    model_config = ConfigDict(extra="forbid")

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    return_token_ids: Literal[True] = True
    output_kind: Literal[0, 1, 2] = 0
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def leave_out_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        given = without_defaults(values, known)
        if others := sorted(given.keys() - known):
            name, hint = others[0], did_you_mean(others[0], known)
            raise unknown(f"sampling_params.{name}", given[name], hint, "sampling_params")
        return given

    def as_sampling_params(self) -> dict[str, Any]:
        renamed = {
            "max_new_tokens": self.max_tokens,
            "min_new_tokens": self.min_tokens,
            "sampling_seed": self.seed,
            "no_stop_trim": self.include_stop_str_in_output,
        }
        left = {"max_tokens", "min_tokens", "seed", "include_stop_str_in_output", "logprobs"}
        left |= {"prompt_logprobs", "detokenize", "return_token_ids", "output_kind"}
        left |= {"return_sampling_mask", "return_routed_experts", "routed_experts_prompt_start"}
        form = self.structured_outputs.as_sampling_params() if self.structured_outputs else {}
        return self.model_dump(exclude={*left, "structured_outputs"}) | renamed | form


class TokensIn(BaseModel):
    """vLLM's body. `priority` accepts its default only."""

    token_ids: list[StrictInt]
    sampling_params: TokenSampling
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    model: str | None = None
    stream: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    priority: Literal[0] = 0


class TokenLogprob(BaseModel):
    """`token` is `token_id:N`."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TokenLogprob] = []


class TokenLogprobs(BaseModel):
    content: list[TokenLogprob]


class TokenChoice(BaseModel):
    index: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    sampling_mask: MaskRows | None = None
    output_token_sampling_logprobs: list[float] | None = None
    routed_experts: str | None = None
    finish_reason: str | None = None


class TokenUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TokensOut(BaseModel):
    """A reply, or a chunk of a stream. A chunk has no usage, and only new `token_ids`."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: PromptLogprobs | None = None
    usage: TokenUsage | None = None


class Tokenize(KnownFieldsOnly):
    """A prompt or a conversation. A conversation is rendered with the generation prompt."""

    model: str | None = None
    prompt: str | list[str] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: list[Turn] | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None


class Tokenized(BaseModel):
    """Lists with one entry a prompt, if a list of prompts was sent."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: list[str] | list[list[str]] | None = None


class Detokenize(BaseModel):
    model: str | None = None
    tokens: list[StrictInt]
    skip_special_tokens: bool = False


class Detokenized(BaseModel):
    prompt: str
