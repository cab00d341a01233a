"""From a caller's arguments to a `Call`: everything is checked before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from enginepool.dispatch.grammar import Grammar, GrammarSource
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.scoring import Scoring
from enginepool.dispatch.thinking import Thinking
from enginepool.errors import InvalidGrammar, InvalidRequest
from enginepool.frontend.generation_defaults import GenerationDefaults
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.limits import Limits, check_ids, check_length
from enginepool.frontend.logprob_options import check_named_ids, check_starts, check_top_logprobs
from enginepool.frontend.partial_call import read_part
from enginepool.frontend.sampling import (
    PromptSampling,
    Seeds,
    from_upstream,
    is_upstreams,
    make_sampling,
)
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.values import described, flag, is_int, plain, shown


class InputProcessor:
    """Checks and tokenizes the prompts of a call. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        defaults: GenerationDefaults,
        grammars: GrammarCompiler,
    ) -> None:
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.limits = limits
        self._defaults = defaults
        self._seeds = Seeds()

    def make_call(
        self,
        prompts: str | Sequence[str] | None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        *,
        add_special_tokens: bool | None = None,
        return_logprob: bool | None = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Any = None,
        return_prompt_logprob: bool | None = None,
        logprob_start_len: int | Sequence[int] | None = None,
        prompt_top_logprobs_num: int | None = None,
        prompt_indices: Sequence[int] | None = None,
        sample_indices: Sequence[int] | None = None,
        partial_outputs: Sequence[Mapping[str, Any] | None] | None = None,
        stream: bool = False,
        pinned_to: int | None = None,
        extra_key: str | None = None,
        rids: Sequence[str] | None = None,
        clamp: bool = False,
        thinking: Thinking | None = None,
        weight_version: int | str = 0,
    ) -> Call:
        """Build the requests of a call, n a prompt, grouped by prompt.

        A caller's NumPy and JAX values become plain Python here, once. A `max_new_tokens` of 0,
        with log-probabilities of the prompt, generates nothing.

        Args:
            add_special_tokens: Whether texts get those that the tokenizer adds; they do if left
                out.
            prompt_top_logprobs_num: Of the prompt's tokens; left out, `top_logprobs_num`.
            clamp: Cut a `max_new_tokens` that does not fit down to the room, and do not refuse it.
            thinking: What comes before that which outputs are held to.

        Raises:
            InvalidRequest: With the prompt's index, the value, the limit and the remedy.
        """
        if add_special_tokens is not None and prompts is None:
            raise InvalidRequest(
                f"add_special_tokens={shown(add_special_tokens)}: nothing is added to input_ids; "
                "leave it out"
            )
        special = add_special_tokens is None or flag("add_special_tokens", add_special_tokens)
        texts, token_ids, lone = self.prompts(prompts, input_ids, special_tokens=special)
        scored = flag("return_prompt_logprob", return_prompt_logprob)
        sampling = self._sampling(sampling_params, len(token_ids), scored)
        top_logprobs_num = check_top_logprobs(top_logprobs_num)
        prompt_top = top_logprobs_num
        if prompt_top_logprobs_num is not None:
            prompt_top = check_top_logprobs(prompt_top_logprobs_num)
        named = check_named_ids(token_ids_logprob, len(token_ids), self.limits.vocab_size)
        return_logprob = flag("return_logprob", return_logprob) or top_logprobs_num > 0
        return_logprob = return_logprob or any(named)
        if rids is not None and len(rids) != len(token_ids):
            raise InvalidRequest(f"{len(rids)} request ids for {len(token_ids)} prompts")
        for index, prompt in enumerate(token_ids):
            check_ids(prompt, "the prompt", index, self.limits)
        starts = check_starts(scored, logprob_start_len, token_ids, self.limits)
        for index, (prompt, one) in enumerate(zip(token_ids, sampling, strict=True)):
            check_length(index, prompt, one, self.limits, clamp=clamp)
        part = read_part(
            prompt_indices,
            sample_indices,
            partial_outputs,
            sampling,
            token_ids,
            self.limits,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            named_ids=named,
        )
        grammars = self._grammars(sampling)
        call = Call(weight_version, lone=lone)
        for index, (prompt, one) in enumerate(zip(token_ids, sampling, strict=True)):
            start, alone = starts[index], one.params.max_new_tokens == 0
            prompt_index, given = part.prompt_indices[index], part.partial_outputs[index]
            scoring = None
            if start is not None:
                scoring = Scoring(start, prompt_top, named[index], alone=alone)
            sample = partial(
                Request,
                call,
                prompt,
                text=texts[index],
                prompt_index=prompt_index,
                rid=rids[index] if rids else "",
                return_logprob=return_logprob,
                top_logprobs_num=top_logprobs_num,
                named_ids=named[index],
                stream=stream,
                pinned_to=pinned_to,
                extra_key=extra_key,
                scoring=scoring,
                grammar=grammars[index],
                thinking=thinking,
            )
            for sample_index in part.samples(index, one.n):
                params = self._one_sample(one, len(prompt), prompt_index, sample_index)
                call.add(sample(params, sample_index=sample_index, **given.for_a_request()))
        return call

    def prompts(
        self,
        prompts: Any,
        input_ids: Any,
        *,
        names: tuple[str, str] = ("prompts", "input_ids"),
        special_tokens: bool = True,
    ) -> tuple[Sequence[str | None], list[list[int]], bool]:
        """Texts, ids, and whether it is one prompt and not a list; an empty list is one of no
        prompts.

        Args:
            names: Of the two arguments, for errors.
            special_tokens: Whether texts get those that the tokenizer adds.
        """
        of_texts, of_ids = names
        if (prompts is None) == (input_ids is None):
            raise InvalidRequest(f"give either {of_texts} or {of_ids}, and not both")
        if input_ids is not None:
            rows = _as_list(of_ids, input_ids)
            lone = bool(rows) and _is_scalar(rows[0])
            rows = [rows] if lone else rows
            token_ids = [_plain_ids(of_ids, index, prompt) for index, prompt in enumerate(rows)]
            return [None] * len(token_ids), token_ids, lone
        prompts = plain(prompts)
        lone = isinstance(prompts, str)
        texts = [prompts] if lone else _as_list(of_texts, prompts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"expected a string, got {type(text).__name__} {described(text)}; token ids "
                    f"go to {of_ids}=, messages to chat()",
                    prompt_index=index,
                )
        return texts, self.tokenizer.encode(texts, special_tokens=special_tokens), lone

    def _sampling(self, params: Any, count: int, scored: bool) -> list[PromptSampling]:
        """
        Args:
            scored: Whether log-probabilities of the prompts are wanted.
        """
        if params is None:
            return [self._default_sampling()] * count
        if isinstance(params, Mapping) or is_upstreams(params):
            return [self._make(params, scored=scored)] * count
        params = _as_list("sampling_params", params)
        if len(params) != count:
            raise InvalidRequest(
                f"sampling_params has {len(params)} entries for {count} prompts: give one dict "
                "for all of them, or one a prompt"
            )
        made = []
        for index, one in enumerate(params):
            try:
                made += [
                    self._default_sampling() if one is None else self._make(one, scored=scored)
                ]
            except InvalidRequest as error:
                raise InvalidRequest(str(error), prompt_index=index) from None
        return made

    def _default_sampling(self) -> PromptSampling:
        self._defaults.check()
        try:
            return self._make(self._defaults.params, explicit=False)
        except InvalidRequest as error:
            raise self._defaults.blamed(error) from None

    def _make(self, params: Any, *, explicit: bool = True, scored: bool = False) -> PromptSampling:
        params = from_upstream(params) if is_upstreams(params) else params
        if not isinstance(params, Mapping):
            raise InvalidRequest(f"sampling_params: expected a dict, got {described(params)}")
        made = make_sampling(
            params,
            vocab_size=self.limits.vocab_size,
            tokenizer=self.tokenizer.hf,
            end_ids=self.limits.end_ids,
            explicit=explicit,
        )
        if made.params.max_new_tokens == 0 and not scored:
            raise InvalidRequest(
                "max_new_tokens=0: expected an integer, 1 or more; 0 only with log-probabilities "
                "of the prompt (return_prompt_logprob=True)"
            )
        return made

    def _grammars(self, sampling: Sequence[PromptSampling]) -> list[Grammar | None]:
        """What every prompt's outputs are held to, compiled."""
        made: dict[GrammarSource | None, Grammar | None] = {None: None}
        for index, one in enumerate(sampling):
            if one.grammar in made:
                continue
            assert one.grammar is not None
            try:
                if not self.limits.end_ids:
                    raise InvalidGrammar(
                        f"{one.grammar.kind} needs an end token, which comes behind a complete "
                        "output: name one in the tokenizer or as eos_token_id in config.json"
                    )
                made[one.grammar] = self.grammars.compile(one.grammar)
            except InvalidGrammar as error:
                lone = all(other is one for other in sampling)
                raise InvalidGrammar(str(error), prompt_index=None if lone else index) from error
        return [made[one.grammar] for one in sampling]

    def _one_sample(
        self, sampling: PromptSampling, prompt: int, index: int, sample_index: int
    ) -> Any:
        """Upstream's object for one sample: its own stream of random numbers, one output."""
        params = copy.copy(sampling.params)
        params.n = 1
        room = self.limits.total - prompt
        if params.max_new_tokens != 0:
            params.max_new_tokens = min(params.max_new_tokens or room, room)
        if sampling.seed is None:
            params.sampling_seed = self._seeds.fresh()
        else:
            params.sampling_seed = Seeds.derived(sampling.seed, index, sample_index)
        return params


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__iter__")


def _as_list(name: str, value: Any) -> list[Any]:
    """A caller's sequence or array as a list."""
    value = plain(value, depth=0)
    if isinstance(value, (str, bytes, Mapping)) or _is_scalar(value):
        raise InvalidRequest(f"{name}: expected a list, one entry a prompt, got {described(value)}")
    return list(value)


def _plain_ids(name: str, index: int, prompt: Any) -> list[int]:
    """Python integers: upstream compares, concatenates and hashes them as such."""
    try:
        ids = _as_list(name, prompt)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name}: expected a list of token ids, got {described(prompt)}", prompt_index=index
        ) from None
    if not set(map(type, ids)) <= {int}:
        ids = [plain(token_id) for token_id in ids]
    for token_id in ids:
        if not is_int(token_id):
            raise InvalidRequest(
                f"{name}: {described(token_id)} is not an integer", prompt_index=index
            )
    return ids
