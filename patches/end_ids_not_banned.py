"""min_new_tokens bans every id that ends a request.

What breaks: An output may end before `min_new_tokens`: at an end id that config.json or
generation_config.json names and the tokenizer does not.

Why: `BatchedMinNewTokensPenalizer` bans a request's `stop_token_ids` and its tokenizer's end ids.
`Req.check_finished` also looks at the model's, `req.eos_token_ids`.

What we change: The prepared penalizer bans the model's end ids too.

Remove when: Upstream's penalizer asks for `req.eos_token_ids`.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.sampling.penaltylib.min_new_tokens"


def _is_needed(original) -> bool:
    """Prepare one for a request of a model with end id 2. Is it banned?"""
    params = SimpleNamespace(min_new_tokens=2, stop_token_ids=None)
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    req = SimpleNamespace(
        sampling_params=params, output_ids=[], tokenizer=tokenizer, eos_token_ids={2}
    )
    unpatched = type(
        "Original", (module(_MODULE).BatchedMinNewTokensPenalizer,), {"prepare": original}
    )
    penalizer = unpatched(SimpleNamespace(vocab_size=4, reqs=lambda: [req]))
    penalizer.prepare()
    return bool(np.isfinite(penalizer.compute_penalty()[0, 2]))


def _replace(original):
    def prepare(self):
        prepared = self.is_prepared()
        original(self)
        if prepared:
            return
        for row, req in enumerate(self.orchestrator.reqs()):
            ends = [int(end) for end in getattr(req, "eos_token_ids", None) or ()]
            banned = [*self.stop_token_sequences[row], *(end for end in ends if end >= 0)]
            self.stop_token_sequences[row] = np.array(banned, np.int64)

    return prepare


PATCH = Patch(
    name="end_ids_not_banned",
    issue="not reported",
    replaced=(
        Target(
            _MODULE, "BatchedMinNewTokensPenalizer.prepare", _replace, ("self",), inherited=True
        ),
    ),
    probe=_is_needed,
)
