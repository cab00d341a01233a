"""Bodies and replies of `/v1/responses`, as far as a server that keeps nothing can answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from enginepool.dispatch.request import MAX_TOP_LOGPROBS
from enginepool.serve.unknown_fields import KnownFieldsOnly

LOGPROBS = "message.output_text.logprobs"
# The others belong to tools and images, which no response here has.
Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextPart(BaseModel):
    """`logprobs` are those of an earlier reply, and ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    logprobs: list[Any] = []


class RefusalPart(BaseModel):
    """A refusal in an earlier turn."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class EarlierItem(BaseModel):
    """An item with the id of an earlier reply. It is not looked up."""

    id: str | None = None
    status: str | None = None


class MessageItem(EarlierItem):
    """A turn, or a message of an earlier reply."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart | RefusalPart]


class FunctionCallItem(EarlierItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(EarlierItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]


class ReasoningPart(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(EarlierItem):
    """Reasoning of an earlier reply. Some templates use it, as Qwen3's does."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message=(
            "expected an item of type message, function_call, function_call_output or reasoning"
        ),
    ),
]


class FunctionTool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(BaseModel):
    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class StreamOptions(BaseModel):
    include_obfuscation: Literal[False] = False


class ResponsesBody(KnownFieldsOnly, BaseModel):
    """Input that is too long is an error, with `truncation` "auto" as well. `include` may name
    results of tools and images, which no response has. The fields from `seed` to `cache_salt` are
    sglang's and vLLM's. The last five are for servers that keep conversations. They are refused
    unless they ask for nothing."""

    model: str = ""
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[Included] = []
    tools: list[FunctionTool] = []
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    truncation: Literal["disabled", "auto"] = "disabled"
    metadata: dict[str, str] = {}
    user: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    store: bool = False
    background: bool = False
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class Item(BaseModel):
    """An item by its type: a message has `role` and `content`, a function_call `call_id`, `name`
    and `arguments`, reasoning `summary` and `content`."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesReply(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[Item]
    usage: Usage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[FunctionTool]
    tool_choice: Literal["auto", "required", "none"] | NamedTool
    parallel_tool_calls: bool
    text: TextConfig
    truncation: str
    metadata: dict[str, str]
    store: bool = False
    background: bool = False
    previous_response_id: None = None
