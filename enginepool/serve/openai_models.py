"""OpenAI's bodies and replies as upstream has them, with the fields that vLLM's clients add."""

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
    ScoringRequest,
)

from enginepool.requests.request import MAX_TOP_LOGPROBS
from enginepool.serve.answer_form import StructuredOutputs
from enginepool.serve.unknown_fields import NothingUnread


class WireFields(NothingUnread):
    """vLLM's fields for what goes over the wire.

    Attributes:
        return_token_ids: Give the ids of prompt and output.
        return_tokens_as_token_ids: In log-probabilities, `token_id:N` in the place of texts.
        prompt_logprobs: Log-probabilities of the prompt, with so many of the most probable tokens.
        cache_salt: Prompts of another salt share no prefix cache with this.
        priority: There is no other.
        structured_outputs: What the answer must be.
    """

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    priority: Literal[0] = 0
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(WireFields, CompletionRequest):
    """`max_tokens` of 0 is for who only wants the prompt's log-probabilities."""

    @field_validator("max_tokens")
    @classmethod
    def validate_max_tokens_positive(cls, v: int) -> int:
        if v < 0:
            raise ValueError("max_tokens must not be negative")
        return v


class UserTurn(ChatCompletionMessageUserParam):
    """OpenAI's has a name, which is the template's to use."""

    name: str | None = None


Turn = ChatCompletionMessageGenericParam | UserTurn


class ChatBody(WireFields, ChatCompletionRequest):
    messages: list[Turn]  # pyright: ignore[reportIncompatibleVariableOverride]
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def calls_need_no_content(cls, values: Any) -> Any:
        """OpenAI's clients leave it out of an assistant's turn that is calls alone."""
        messages = values.get("messages") if isinstance(values, dict) else None
        if not isinstance(messages, list):
            return values
        return {**values, "messages": [_with_content(message) for message in messages]}


class ScoreBody(ScoringRequest):
    """`model` may be left out, as in sglang's own routes."""

    model: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    label_token_ids: list[StrictInt] | None = None


def _with_content(message: Any) -> Any:
    if isinstance(message, dict) and message.get("tool_calls"):
        return {"content": None, **message}
    return message


class PromptLogprob(BaseModel):
    """vLLM's; `rank` is known of the most probable tokens that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(CompletionResponseChoice):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(CompletionResponse):
    choices: list[CompletionChoice]  # pyright: ignore[reportIncompatibleVariableOverride]


class ChatChoice(ChatCompletionResponseChoice):
    token_ids: list[int] | None = None


class ChatReply(ChatCompletionResponse):
    choices: list[ChatChoice]  # pyright: ignore[reportIncompatibleVariableOverride]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
