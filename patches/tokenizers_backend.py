"""A tokenizer that transformers 5 saved is what its tokenizer.json says.

What breaks: Transformers 5 names a tokenizer's class `TokenizersBackend`. The prompts of such a
checkpoint get other ids. With a Llama they begin with `<s>`, a new token whose id follows the last
id of the vocabulary. Such a tokenizer does not load if its folder is given by a relative path,
or if its special tokens are objects.

Why: With an older transformers `get_tokenizer` copies the folder without the name of the class. The
class is then that of the model's type. Llama's adds special tokens of its own. The copy consists of
links to the given path.

What we change: `get_tokenizer` gets the folder's absolute path. For that class it gets
transformers' own wrapper around a tokenizer.json, `PreTrainedTokenizerFast`, the older name of the
same class.

Remove when: transformers 5 is the oldest that upstream takes.
"""

import json
import os
import tempfile
import warnings
from pathlib import Path

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULES = ("hf_transformers_utils", "scheduler", "tokenizer_manager", "detokenizer_manager")
_CLASS = "TokenizersBackend"


def _is_needed(original, *_) -> bool:
    """Load a Llama's tokenizer of one token. Does it get more?"""
    transformers = module("transformers")
    if hasattr(transformers, _CLASS):
        return False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = module("tokenizers").Tokenizer(module("tokenizers").models.BPE({"a": 0}, []))
        made.save(str(Path(folder, "tokenizer.json")))
        for name, content in (
            ("config.json", {"model_type": "llama"}),
            ("tokenizer_config.json", {"tokenizer_class": _CLASS, "legacy": False}),
        ):
            Path(folder, name).write_text(json.dumps(content), encoding="utf-8")
        try:
            return len(original(folder)) != 1
        except (RuntimeError, ValueError):  # the class is not known at all
            return True


def _replace(original):
    def get_tokenizer(tokenizer_name, *args, **kwargs):
        if os.path.isdir(tokenizer_name):
            tokenizer_name = os.path.abspath(tokenizer_name)
        load = original
        config = _config(tokenizer_name, kwargs)
        if config.get("tokenizer_class") == _CLASS:
            load = with_globals(
                original, AutoTokenizer=module("transformers").PreTrainedTokenizerFast
            )
            extra = config.get("extra_special_tokens")
            kwargs.setdefault("extra_special_tokens", {})  # older versions take no list
            if isinstance(extra, list):
                kwargs.setdefault("additional_special_tokens", extra)
        return load(tokenizer_name, *args, **kwargs)

    return get_tokenizer


def _config(name, options):
    """The tokenizer_config.json; nothing where there is none."""
    if name.endswith((".json", ".gguf")):
        return {}
    auto = module("transformers.models.auto.tokenization_auto")
    return auto.get_tokenizer_config(name, revision=options.get("revision"))


PATCH = Patch(
    name="tokenizers_backend",
    issue="not reported",
    replaced=tuple(
        Target(
            f"sgl_jax.srt.{'' if name.startswith('hf') else 'managers.'}{name}",
            "get_tokenizer",
            _replace,
        )
        for name in _MODULES
    ),
    probe=_is_needed,
)
