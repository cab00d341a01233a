"""Turns a caller's arguments into a `Call`. Everything is checked before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from enginepool.dispatch.grammar import Grammar, GrammarSource
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.thinking import Thinking
from enginepool.errors import InvalidGrammar, InvalidRequest
from enginepool.frontend.call_options import CallOptions, Params, Prompts
from enginepool.frontend.generation_defaults import GenerationDefaults
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.limits import Limits, check_length
from enginepool.frontend.logprob_options import read_logprobs
from enginepool.frontend.partial_call import BatchPart, read_batch_part
from enginepool.frontend.prompts import as_list, read_prompts
from enginepool.frontend.sampling import (
    PromptSampling,
    Seeds,
    from_upstream,
    is_upstreams,
    make_sampling,
)
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.lora.adapter import Adapter, Adapters
from enginepool.values import described, flag, plain, shown

if TYPE_CHECKING:
    from sgl_jax.srt.sampling.sampling_params import SamplingParams


class InputProcessor:
    """Checks and tokenizes the prompts of a call. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        defaults: GenerationDefaults,
        grammars: GrammarCompiler,
        adapters: Adapters,
    ) -> None:
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.limits = limits
        self._defaults = defaults
        self._seeds = Seeds()

    def make_call(
        self,
        prompts: Prompts,
        sampling_params: Params | SamplingParams,
        options: CallOptions,
        *,
        prompt_top_logprobs_num: int | None = None,
        stream: bool = False,
        pinned_to: int | None = None,
        extra_key: str | None = None,
        rids: Sequence[str] | None = None,
        clamp: bool = False,
        thinking: Thinking | None = None,
        weight_version: int | str = 0,
    ) -> Call:
        """Build the requests of a call: n for each prompt, grouped by prompt.

        NumPy and JAX values of the caller become plain Python here, once.

        Args:
            options: As `check_options` returns them. `timeout` is not read.
            prompt_top_logprobs_num: `top_logprobs_num` for the prompt's tokens. None: the value in
                the options.
            clamp: Cut a `max_new_tokens` that does not fit, instead of refusing it.
            thinking: How the model marks its thinking. A grammar applies to the text after the
                thinking.

        Raises:
            InvalidRequest: The error has the prompt's index, the value, the limit and the remedy.
        """
        texts, token_ids, lone = self._tokenize(prompts, options)
        scored = flag("return_prompt_logprob", options.get("return_prompt_logprob"))
        sampling = self._sampling(sampling_params, len(token_ids), scored)
        if rids is not None and len(rids) != len(token_ids):
            raise InvalidRequest(f"{len(rids)} request ids for {len(token_ids)} prompts")
        logprobs = read_logprobs(options, prompt_top_logprobs_num, token_ids, self.limits)
        for index, (prompt, one) in enumerate(zip(token_ids, sampling, strict=True)):
            check_length(index, prompt, one, self.limits, clamp=clamp)
        part = read_batch_part(options, sampling, token_ids, logprobs, self.limits)
        grammars = self._grammars(sampling)
        adapters = self.adapters_of(options.get("lora_path"), len(token_ids))
        call = Call(weight_version, lone=lone)
        for index, (prompt, one) in enumerate(zip(token_ids, sampling, strict=True)):
            make = partial(
                Request,
                call,
                prompt,
                text=texts[index],
                rid=rids[index] if rids else "",
                stream=stream,
                pinned_to=pinned_to,
                extra_key=extra_key,
                adapter=adapters[index],
                grammar=grammars[index],
                thinking=thinking,
                **logprobs.for_a_request(index, scored_only=one.params.max_new_tokens == 0),
            )
            self._add_samples(call, one, part, index, self.limits.total - len(prompt), make)
        return call

    def _tokenize(
        self, prompts: Prompts, options: CallOptions
    ) -> tuple[Sequence[str | None], list[list[int]], bool]:
        special = options.get("add_special_tokens")
        if special is not None and prompts is None:
            raise InvalidRequest(
                f"add_special_tokens={shown(special)}: input_ids get no tokens added; leave it out"
            )
        return read_prompts(
            self.tokenizer,
            prompts,
            options.get("input_ids"),
            special_tokens=flag("add_special_tokens", special, default=True),
        )

    def _add_samples(
        self,
        call: Call,
        sampling: PromptSampling,
        part: BatchPart,
        index: int,
        room: int,
        make: Callable[..., Request],
    ) -> None:
        """Add the samples of prompt `index`, each with its own random stream.

        Args:
            room: The most tokens of an output.
        """
        prompt_index, given = part.prompt_indices[index], part.partial_outputs[index]
        for sample_index in part.samples(index, sampling.n):
            params = copy.copy(sampling.params)
            params.n = 1
            if params.max_new_tokens != 0:
                params.max_new_tokens = min(params.max_new_tokens or room, room)
            if sampling.seed is None:
                params.sampling_seed = self._seeds.fresh()
            else:
                params.sampling_seed = Seeds.derived(sampling.seed, prompt_index, sample_index)
            sample = {"prompt_index": prompt_index, "sample_index": sample_index}
            call.add(make(params, **sample, **given.for_a_request()))

    def adapters_of(self, names: Any, count: int) -> list[Adapter | None]:
        """The adapter of each prompt, or None for the base.

        Args:
            names: One name for all, or one per prompt; None for the base.
        """
        names = plain(names)
        if names is None or isinstance(names, str):
            names = [names] * count
        names = as_list("lora_path", names)
        if len(names) != count:
            raise InvalidRequest(
                f"lora_path has {len(names)} entries for {count} prompts: give one name for all of "
                "them, or one per prompt"
            )
        return [None if name is None else self.adapters.find(name) for name in names]

    def _sampling(self, params: Any, count: int, scored: bool) -> list[PromptSampling]:
        """The parameters of each prompt.

        Args:
            scored: Whether log-probabilities of the prompts are wanted.
        """
        if params is None:
            return [self._default_sampling()] * count
        if isinstance(params, Mapping) or is_upstreams(params):
            return [self._make(params, scored=scored)] * count
        params = as_list("sampling_params", params, "a dict, or a list of one per prompt")
        if len(params) != count:
            raise InvalidRequest(
                f"sampling_params has {len(params)} entries for {count} prompts: give one dict "
                "for all of them, or one per prompt"
            )
        made = []
        for index, one in enumerate(params):
            try:
                made += [
                    self._default_sampling() if one is None else self._make(one, scored=scored)
                ]
            except InvalidRequest as error:
                raise type(error)(str(error), prompt_index=index) from None
        return made

    def _default_sampling(self) -> PromptSampling:
        self._defaults.check()
        try:
            return self._make(self._defaults.params, explicit=False)
        except InvalidRequest as error:
            raise self._defaults.refusal(error) from None

    def default_params(self, request: Request) -> dict[str, Any]:
        """The parameters of a request whose call gave none, as a call gives them."""
        assert request.sampling is not None
        most, least = request.sampling.max_new_tokens, request.sampling.min_new_tokens
        fitting = {"max_new_tokens": most, "min_new_tokens": min(least, most)}
        return {**self._defaults.params, **fitting}

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
        """The compiled grammar of each prompt, or None."""
        made: dict[GrammarSource | None, Grammar | None] = {None: None}
        for index, one in enumerate(sampling):
            if one.grammar in made:
                continue
            assert one.grammar is not None
            try:
                if not self.limits.end_ids:
                    raise InvalidGrammar(
                        f"{one.grammar.kind} needs an end token to end a complete output: name one "
                        "in the tokenizer or as eos_token_id in config.json"
                    )
                made[one.grammar] = self.grammars.compile(one.grammar)
            except InvalidGrammar as error:
                lone = all(other is one for other in sampling)
                raise InvalidGrammar(str(error), prompt_index=None if lone else index) from error
        return [made[one.grammar] for one in sampling]
