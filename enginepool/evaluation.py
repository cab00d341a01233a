"""A pool as a model of lm_eval, EleutherAI's harness. Its tasks run on the pool's engines.

    results = lm_eval.simple_evaluate(model=PoolLM(pool), tasks=["arc_easy"])

It is an adapter and uses the public API only. It needs the extra `lm-eval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from enginepool import EnginePool

# The harness's names for how many tokens to generate.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class PoolLM(TemplateLM):
    """A model of lm_eval that runs on all engines of a pool.

    The beginning of a text that is too long for an engine is cut, as in the harness's own models.

    Args:
        pool: The pool. It stays open.
        max_gen_toks: The length limit of outputs whose task sets none.
    """

    def __init__(self, pool: EnginePool, *, max_gen_toks: int = 256) -> None:
        super().__init__()
        self.pool = pool
        self.max_gen_toks = max_gen_toks
        front_end = pool.front_end()
        self.tokenizer = front_end.tokenizer
        kv_tokens = min(engine.scheduler_info["max_total_num_tokens"] for engine in pool.engines)
        # The last token that is scored needs no KV cache.
        self.max_length: int = min(front_end.model_config.context_len, kv_tokens + 1)
        self._longest_prompt: int = front_end.max_req_input_len - 1

    @property
    def tokenizer_name(self) -> str:
        return str(self.pool.config.model)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation: its log-probability, and whether greedy decoding gives it."""
        keys, contexts, continuations = [], [], []
        for key, context, continuation in requests:
            room = max(1, self.max_length - len(continuation))
            keys.append(key)
            contexts.append(context[-room:])
            continuations.append(continuation)
        results: Any = self.pool.score(
            input_ids=contexts,
            continuation_ids=continuations,
            top_logprobs_num=1,
            raise_on_error=True,
        )
        answers = []
        for key, result in zip(keys, results, strict=True):
            best = [top[0][1] for top in result["top_logprobs"]]
            answer = sum(result["logprobs"]), best == result["continuation_ids"]
            answers.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts. A text that is too long is scored in windows, each token once."""
        del disable_tqdm
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate outputs up to a stop string, which is cut."""
        del disable_tqdm
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            sampling = self._sampling(options)
            room = max(1, self.max_length - 2 - sampling["max_new_tokens"])
            prompts.append(self.tok_encode(context)[-min(room, self._longest_prompt) :])
            params.append(sampling)
        results = self.pool.generate_all(None, params, input_ids=prompts, raise_on_error=True)
        texts = [result["text"] for result in results]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The harness's options as sampling parameters. Greedy unless the task samples."""
        options = dict(options)
        stop = options.pop("until", None) or []
        samples = options.pop("do_sample", None)
        lengths = [value for name in _LENGTHS if (value := options.pop(name, None)) is not None]
        if samples is False:
            options["temperature"] = 0.0
        return {
            "temperature": 1.0 if samples else 0.0,
            **options,
            "stop": [stop] if isinstance(stop, str) else list(stop),
            "max_new_tokens": min(int((lengths or [self.max_gen_toks])[0]), self.max_length - 3),
            "n": 1,
        }
