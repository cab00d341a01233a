"""Refuses fields of OpenAI's bodies that upstream's models accept and that have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginepool.pool.tokenizer_manager import UNSUPPORTED
from enginepool.serve.error_replies import Refused
from enginepool.serve.openai_models import ChatBody, CompletionBody

if TYPE_CHECKING:
    from sgl_jax.srt.server_args import ServerArgs

# Fields of upstream's models that its serving classes ignore, or that a pool does not support.
_UNSERVED = ("suffix", "session_params", *UNSUPPORTED)


def check_fields(body: ChatBody | CompletionBody, server_args: ServerArgs) -> None:
    """
    Raises:
        Refused: A field would be ignored, or does not go with another.
    """
    for name in _UNSERVED:
        if getattr(body, name, None):
            raise Refused(400, f"{name} is not supported in a pool", param=name)
    if getattr(body, "lora_path", None):
        raise Refused(400, "lora_path: name the adapter as model", param="lora_path")
    best_of = getattr(body, "best_of", None)
    if best_of is not None and best_of != body.n:
        raise Refused(
            400, f"best_of={best_of}: all n={body.n} samples are returned; leave it out",
            param="best_of",
        )  # fmt: skip
    for name in ("prompt_logprobs", "return_sampling_mask", "return_routed_experts"):
        if getattr(body, name) not in (None, False) and body.stream:
            raise not_in_a_stream(name)
    echoed = getattr(body, "echo", False) and body.logprobs is not None
    if body.prompt_logprobs is not None and echoed:
        raise Refused(
            400, "prompt_logprobs, and echo with logprobs, both return the prompt's "
            "log-probabilities; give one of them",
            param="prompt_logprobs",
        )  # fmt: skip
    if body.cache_salt is not None and body.extra_key not in (None, body.cache_salt):
        raise Refused(
            400, "cache_salt and extra_key are two names for one thing: give one of them",
            param="cache_salt",
        )  # fmt: skip
    if getattr(body, "prompt", None) == []:
        raise Refused(400, "prompt=[]: there is no prompt", param="prompt")
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "stream_options are for stream=true only", param="stream_options")
    chat = isinstance(body, ChatBody)
    if body.return_tokens_as_token_ids and not (
        body.logprobs if chat else body.logprobs is not None
    ):
        raise Refused(
            400, "return_tokens_as_token_ids without logprobs: it changes how tokens are written "
            "in them; for the ids themselves send return_token_ids",
            param="return_tokens_as_token_ids",
        )  # fmt: skip
    # `vars`, because `body.max_tokens` warns: OpenAI calls it deprecated.
    _check_lengths(vars(body), scored=echoed or body.prompt_logprobs is not None)
    if isinstance(body, ChatBody):
        _check_chat(body, server_args)
        _check_reasoning(body, server_args.reasoning_parser)


def not_in_a_stream(name: str) -> Refused:
    return Refused(400, f"{name} is not supported in a stream; leave stream=true out", param=name)


def _check_lengths(given: dict[str, Any], *, scored: bool) -> None:
    old, new = given["max_tokens"], given.get("max_completion_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        if given.get(name) == 0 and not (scored and "prompt" in given):
            only = "; 0 is for echo with logprobs, or prompt_logprobs" if "prompt" in given else ""
            raise Refused(400, f"{name}=0: expected 1 or more{only}", param=name)
    if new is not None and old not in (None, new):
        raise Refused(
            400, f"max_completion_tokens={new} and max_tokens={old}: give one of them",
            param="max_completion_tokens",
        )  # fmt: skip


def _check_chat(body: ChatBody, server_args: ServerArgs) -> None:
    if body.top_logprobs and not body.logprobs:
        raise Refused(
            400, f"top_logprobs={body.top_logprobs} without logprobs=true", param="top_logprobs"
        )
    if body.continue_final_message and (not body.messages or body.messages[-1].role != "assistant"):
        raise Refused(
            400, "continue_final_message: the last message is not the assistant's",
            param="continue_final_message",
        )  # fmt: skip
    if body.continue_final_message:
        last: Any = body.messages[-1]
        if last.tool_calls or last.reasoning_content:  # upstream leaves them out of the prompt
            raise Refused(
                400, "continue_final_message: the answer goes on after content only; leave "
                "tool_calls and reasoning_content of the last message out",
                param="continue_final_message",
            )  # fmt: skip
    if not body.tools:
        if body.tool_choice not in ("none", "auto"):
            raise Refused(400, "tool_choice without tools", param="tool_choice")
        if not body.parallel_tool_calls:
            raise Refused(
                400, "parallel_tool_calls=false without tools", param="parallel_tool_calls"
            )
    elif body.tool_choice != "none" and server_args.tool_call_parser is None:
        raise Refused(
            400,
            "tools: the server was started without --tool-call-parser, which says how its model "
            "writes calls (upstream's names: qwen25, qwen3_coder, …); start it with one, or leave "
            'tools out (in a chat, tool_choice="none" does that)',
            param="tools",
        )


def _check_reasoning(body: ChatBody, parser: str | None) -> None:
    """`separate_reasoning` and `stream_reasoning` are true by default."""
    if parser is None and body.separate_reasoning and "separate_reasoning" in body.model_fields_set:
        raise Refused(
            400, "separate_reasoning: the server was started without --reasoning-parser, which "
            "says how its model writes reasoning",
            param="separate_reasoning",
        )  # fmt: skip
    if not body.stream_reasoning and not (parser and body.separate_reasoning and body.stream):
        raise Refused(
            400, "stream_reasoning=false is for stream=true, with reasoning that is separated "
            "(--reasoning-parser)",
            param="stream_reasoning",
        )  # fmt: skip


def check_template_options(body: ChatBody, names: set[str]) -> None:
    """Refuse a client's own template, which would run here without a time limit."""
    for name in body.chat_template_kwargs or ():
        if name in names:
            raise Refused(
                400,
                f"chat_template_kwargs: {name!r} is not a variable of the template, and clients "
                "may not set it; leave it out",
                param="chat_template_kwargs",
            )
