"""Penalties count the outputs that a request already has.

What breaks: frequency_penalty, presence_penalty and min_new_tokens forget the outputs of a request
that enters a batch again. That happens to every request that upstream retracts when the KV cache is
full, and to one that continues on another engine.

Why: The penalizers count the tokens that were sampled since the batch was built. They do not look
at outputs from before.

What we change: A penalizer that is prepared counts the requests' output ids too. For a request
without outputs nothing changes. One error is left: under overlap scheduling upstream counts a token
one step late. So at a resumed request's first decode step it counts the last earlier output a
second time. (If a request has no outputs, upstream counts the prompt's last token at that step.)

Remove when: Upstream's penalizers look at `req.output_ids` when they are prepared.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module
from patches._patch import Patch, Target

_FREQUENCY = "sgl_jax.srt.sampling.penaltylib.frequency_penalty"
_PRESENCE = "sgl_jax.srt.sampling.penaltylib.presence_penalty"
_MIN_NEW_TOKENS = "sgl_jax.srt.sampling.penaltylib.min_new_tokens"


def _is_needed(frequency, presence, min_new_tokens) -> bool:
    """Prepare each penalizer for a request with outputs. Does it see them?"""
    probes = (
        (_FREQUENCY, "BatchedFrequencyPenalizer", frequency),
        (_PRESENCE, "BatchedPresencePenalizer", presence),
        (_MIN_NEW_TOKENS, "BatchedMinNewTokensPenalizer", min_new_tokens),
    )
    return any(_forgets(getattr(module(path), name), prepare) for path, name, prepare in probes)


def _forgets(penalizer_class, prepare) -> bool:
    def penalty(output_ids):
        params = SimpleNamespace(
            frequency_penalty=1.0, presence_penalty=1.0, min_new_tokens=2, stop_token_ids={1}
        )
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
        req = SimpleNamespace(sampling_params=params, output_ids=output_ids, tokenizer=tokenizer)
        original = type("Original", (penalizer_class,), {"_prepare": prepare})
        penalizer = original(SimpleNamespace(vocab_size=4, reqs=lambda: [req]))
        penalizer.prepare()
        return penalizer.compute_penalty()

    return bool(np.array_equal(penalty([]), penalty([2, 2])))


def _outputs(penalizer):
    return enumerate(req.output_ids or () for req in penalizer.orchestrator.reqs())


def _replace_frequency(original):
    def prepare(self):
        original(self)
        for row, output_ids in _outputs(self):
            np.add.at(self.token_frequencies[row], np.asarray(output_ids, dtype=np.int64), 1)

    return prepare


def _replace_presence(original):
    def prepare(self):
        original(self)
        for row, output_ids in _outputs(self):
            self.token_presence[row, np.asarray(output_ids, dtype=np.int64)] = True

    return prepare


def _replace_min_new_tokens(original):
    def prepare(self):
        original(self)
        for row, output_ids in _outputs(self):
            self.len_output_tokens[row] += len(output_ids)

    return prepare


PATCH = Patch(
    name="penalties_after_retract",
    issue="not reported",
    replaced=(
        Target(_FREQUENCY, "BatchedFrequencyPenalizer._prepare", _replace_frequency, ("self",)),
        Target(_PRESENCE, "BatchedPresencePenalizer._prepare", _replace_presence, ("self",)),
        Target(
            _MIN_NEW_TOKENS,
            "BatchedMinNewTokensPenalizer._prepare",
            _replace_min_new_tokens,
            ("self",),
        ),
    ),
    probe=_is_needed,
)
