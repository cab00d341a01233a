"""Turns text into ids, on the caller's thread. `detokenizer.py` turns ids into text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginepool.errors import InvalidRequest
from enginepool.frontend.chat import ChatTemplate, check_messages
from enginepool.frontend.fair_lock import FairLock
from enginepool.values import described

if TYPE_CHECKING:
    from sgl_jax.srt.server_args import ServerArgs

# How many prompt tokens are decoded with an output, for tokenizers in which a token's text depends
# on its neighbours (upstream's INIT_INCREMENTAL_DETOKENIZATION_OFFSET).
_CONTEXT = 5
_GROUP = 1 << 16  # characters that a thread encodes before it lets others in
# Options of `apply_chat_template` that would make it return something other than ids.
_ANOTHER_RESULT = frozenset(
    ("conversation", "tokenize", "return_tensors", "return_dict", "return_assistant_tokens_mask")
)


class Tokenizer:
    """A Hugging Face tokenizer, usable from many threads at once.

    Attributes:
        lock: Hold it to encode with `hf` directly.
        chat: The content forms that the chat template takes.
        decode_context: How many ids before an output are decoded with it.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.chat = ChatTemplate(hf)
        # A fast tokenizer is mutable while it encodes ("Already borrowed").
        self.lock = FairLock()
        decoder = getattr(getattr(hf, "backend_tokenizer", None), "decoder", None)
        self.decode_context = 0 if "ByteLevel" in type(decoder).__name__ else _CONTEXT

    @classmethod
    def load(cls, server_args: ServerArgs) -> Tokenizer:
        """Load the tokenizer that upstream's engines load for these `ServerArgs`."""
        from sgl_jax.srt.hf_transformers_utils import get_tokenizer

        options: dict[str, Any] = {
            "tokenizer_mode": server_args.tokenizer_mode,
            "trust_remote_code": server_args.trust_remote_code,
            "revision": server_args.revision,
        }
        if hasattr(server_args, "tokenizer_backend"):  # not in 0.0.3rc99
            options["tokenizer_backend"] = server_args.tokenizer_backend
        hf: Any = get_tokenizer(server_args.tokenizer_path or server_args.model_path, **options)
        # Upstream puts the text of chat_template.jinja in the place of all named templates.
        named = getattr(hf, "init_kwargs", {}).get("chat_template")
        if isinstance(named, dict):
            hf.chat_template = named
        return cls(hf)

    def encode(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text. `special_tokens`: with those that the tokenizer adds."""
        try:
            return self._encode(list(texts), special_tokens) if texts else []
        except Exception:  # such as half a surrogate pair: the error names no prompt
            for index, text in enumerate(texts):
                try:
                    self._encode([text], special_tokens)
                except Exception as error:
                    raise InvalidRequest(
                        f"the tokenizer does not take {described(text)}: {error}",
                        prompt_index=index,
                    ) from error
            raise

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        ids: list[list[int]] = []
        for group in _groups(texts):
            with self.lock:
                ids += self.hf(group, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def apply_chat_template(
        self, index: int, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> Any:
        """The ids of conversation `index` of a call, up to where the assistant answers.

        Args:
            options: Arguments of the Hugging Face tokenizer's `apply_chat_template`, and variables
                of the template. `chat_template` replaces the template. Clients of a server cannot
                reach this method.
        """
        for name in _ANOTHER_RESULT.intersection(options):
            raise InvalidRequest(f"chat_template_kwargs: the pool sets {name} itself; leave it out")
        messages = check_messages(messages, index)
        template = options.get("chat_template")
        if template is None and not getattr(self.hf, "chat_template", None):
            raise InvalidRequest("the tokenizer has no chat template; use generate() with text")
        options.setdefault("add_generation_prompt", True)
        try:
            fitted = self.chat.fit(messages, template)
            with self.lock:
                return self.hf.apply_chat_template(
                    fitted, tokenize=True, return_dict=False, **options
                )
        # A template is the checkpoint's own program and may raise anything.
        except Exception as error:
            raise InvalidRequest(
                f"the chat template does not take {described(messages)}: {error}",
                prompt_index=index,
            ) from error

    def token_text(self, token_id: int) -> str:
        return self.hf.decode([token_id])


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Split texts into groups: enough work for the tokenizer, and short waits for other threads."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
