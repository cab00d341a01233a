"""OpenAI's bodies and replies: upstream's models, with the fields that vLLM's clients add."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, StrictInt, field_validator, model_validator
from sgl_jax.srt.entrypoints.openai.protocol import (
    ChatCompletionMessageGenericParam,
    ChatCompletionMessageUserParam,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    Function,
    ModelCard,
    ModelList,
    ScoringRequest,
    StreamOptions,
    Tool,
)

from enginepool.dispatch.request import MAX_TOP_LOGPROBS
from enginepool.serve.answer_form import StructuredOutputs
from enginepool.serve.unknown_fields import KnownFieldsOnly


class WireFields(KnownFieldsOnly):
    """Fields that vLLM's clients add.

    Attributes:
        return_token_ids: Give the ids of prompt and output.
        return_tokens_as_token_ids: In log-probabilities, `token_id:N` in the place of texts.
        prompt_logprobs: Give log-probabilities of the prompt, with this many most probable tokens.
        return_sampling_mask: Give the ids that each output token was sampled from.
        return_routed_experts: Give the experts of all tokens.
        routed_experts_prompt_start: The first prompt token whose experts are given.
        cache_salt: Prompts with different salts share no prefix cache.
        priority: Accepts its default only.
        structured_outputs: The form that the answer must have.
    """

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    priority: Literal[0] = 0
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    custom_params: dict[str, Any] | None = None

    def as_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters among these fields."""
        made: dict[str, Any] = {"custom_params": self.custom_params}
        if self.include_stop_str_in_output:
            made["no_stop_trim"] = True
        if not self.spaces_between_special_tokens:
            made["spaces_between_special_tokens"] = False
        return made


class StreamOptionsBody(StreamOptions):
    """With vLLM's `continuous_usage_stats`: the usage so far in every chunk."""

    continuous_usage_stats: bool | None = False


class CompletionBody(WireFields, CompletionRequest):
    """`max_tokens` may be 0, for the prompt's log-probabilities alone. `model` may be left out.
    `add_special_tokens` is vLLM's: False for text that has its special tokens already."""

    model: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream_options: StreamOptionsBody | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    return_routed_experts: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    add_special_tokens: bool = True

    @field_validator("max_tokens")
    @classmethod
    def validate_max_tokens_positive(cls, v: int) -> int:
        if v < 0:
            raise ValueError("max_tokens must not be negative")
        return v


class UserTurn(ChatCompletionMessageUserParam):
    """OpenAI's message, with a name, which templates may use."""

    name: str | None = None


class OtherTurn(ChatCompletionMessageGenericParam):
    @model_validator(mode="before")
    @classmethod
    def calls_need_no_content(cls, values: Any) -> Any:
        """OpenAI's clients leave `content` out of an assistant's turn with calls alone."""
        if isinstance(values, dict) and values.get("tool_calls"):
            return {"content": None, **values}
        return values


Turn = OtherTurn | UserTurn


class FunctionBody(Function):
    parameters: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    name: str  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]

    @field_validator("parameters")
    @classmethod
    def definitions_are_an_object(cls, value: Any) -> Any:
        if value and not isinstance(value.get("$defs", {}), dict):
            raise ValueError("$defs: expected an object")
        return value

    @field_validator("strict", mode="before")
    @classmethod
    def null_is_false(cls, value: Any) -> Any:
        return False if value is None else value


class ToolBody(Tool):
    function: FunctionBody  # pyright: ignore[reportIncompatibleVariableOverride]


class ChatBody(WireFields, ChatCompletionRequest):
    """`add_special_tokens` accepts its default only: the template adds special tokens."""

    model: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    messages: list[Turn]  # pyright: ignore[reportIncompatibleVariableOverride]
    tools: list[ToolBody] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    parallel_tool_calls: bool = True
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream_options: StreamOptionsBody | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    add_special_tokens: Literal[False] = False


class ScoreBody(ScoringRequest):
    """`model` may be left out, as in sglang's own routes."""

    model: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    label_token_ids: list[StrictInt] | None = None


class ServedModelCard(ModelCard):
    """`parent` is vLLM's: the model that an adapter is of."""

    parent: str | None = None


class ServedModelList(ModelList):
    data: list[ServedModelCard]  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


class PromptLogprob(BaseModel):
    """vLLM's entry. `rank` is null for a token outside the most probable ones that are wanted."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# vLLM's sampling masks, by position: the ids, null for the whole vocabulary, or the number of ids
# if they are too many to be listed.
MaskRows = list[list[int] | int | None]


class CompletionChoice(CompletionResponseChoice):
    token_ids: list[int] | None = None
    sampling_mask: MaskRows | None = None
    output_token_sampling_logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(CompletionResponse):
    choices: list[CompletionChoice]  # pyright: ignore[reportIncompatibleVariableOverride]


class ChatChoice(ChatCompletionResponseChoice):
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: MaskRows | None = None
    output_token_sampling_logprobs: list[float] | None = None


class ChatReply(ChatCompletionResponse):
    choices: list[ChatChoice]  # pyright: ignore[reportIncompatibleVariableOverride]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
