"""Every id that config.json or generation_config.json names as an end id ends an output.

What breaks: Id 0 does not end an output, whichever file names it. If config.json names 0 alone and
generation_config.json another id, building an engine raises a TypeError.

Why: `ModelConfig.get_hf_eos_token_id` takes 0 for a missing id, and leaves an integer where a set
is expected.

What we change: The method sees a list of ids, and None in the place of an empty list.

Remove when: Upstream asks whether the field is None.
"""

import copy
from types import SimpleNamespace

from patches._patch import Patch, Target


def _is_needed(original) -> bool:
    """Ask for the end ids where one of the files names 0, beside another id and alone."""
    for files in ((0, 1), (1, 0), (0, None)):
        config, generation = (SimpleNamespace(eos_token_id=one) for one in files)
        model = SimpleNamespace(hf_config=config, hf_generation_config=generation)
        try:
            found = original(model)
        except TypeError:
            return True
        if found != {*files} - {None}:
            return True
    return False


def _replace(original):
    def get_hf_eos_token_id(self):
        seen = copy.copy(self)
        seen.hf_config = _listed(self.hf_config)
        seen.hf_generation_config = _listed(self.hf_generation_config)
        return original(seen)

    return get_hf_eos_token_id


def _listed(config):
    """The configuration, with end ids that are a list or None."""
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return config
    listed = copy.copy(config)
    listed.eos_token_id = ([ends] if isinstance(ends, int) else list(ends)) or None
    return listed


PATCH = Patch(
    name="end_id_zero",
    issue="not reported",
    replaced=(
        Target(
            "sgl_jax.srt.configs.model_config",
            "ModelConfig.get_hf_eos_token_id",
            _replace,
            ("self",),
        ),
    ),
    probe=_is_needed,
)
