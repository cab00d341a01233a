"""Reads a config.json of transformers 4 or of transformers 5.

The installed transformers, and upstream with it, read the fields of transformers 4. Transformers 5
writes some under other names. The old names then silently have their defaults: `rope_theta` 10000,
128 experts. `as_read` translates them. Engines get the translation as upstream's
`json_model_override_args`, so nothing of upstream is replaced. Our own code reads configurations
with `load`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.model_config import ARCHITECTURES
from enginepool.values import json_object, shown

# Fields of transformers 5, and their names in transformers 4.
_RENAMED = {"num_local_experts": "num_experts"}


def written(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, as they are written.

    Args:
        model: A directory, a config.json or a hub id. Of a hub id only the configuration is
            fetched.

    Raises:
        InvalidConfig: It cannot be read.
    """
    from transformers import PretrainedConfig

    try:
        found, _ = PretrainedConfig.get_config_dict(
            model, revision=revision, cache_dir=download_dir
        )
    except Exception as error:  # transformers and the hub raise anything
        raise InvalidConfig(f"{model}: the configuration cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{model}: config.json holds {shown(found)}: expected an object")
    if not found:  # transformers returns this for a directory without a config.json
        raise InvalidConfig(
            f"{model}: the configuration cannot be read: no config.json, or an empty one"
        )
    return found


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration into the fields that the installed transformers and upstream read.

    Fields of transformers 4 stay as they are. Transformers 4 has no fields for rotary embeddings
    that differ between layers. They stay in `rope_parameters`.
    """
    found = dict(config)
    family = str(found.get("model_type"))
    known = _constructor_fields(family)
    named = found.get("architectures") or ()
    if family in ARCHITECTURES and not any(str(name).endswith("ForCausalLM") for name in named):
        found["architectures"] = [ARCHITECTURES[family]]  # transformers looks at model_type only
    for new, old in _RENAMED.items():
        if new in found and new not in known and old in known:
            found.setdefault(old, found[new])
            del found[new]
    if family == "qwen2" and found.get("attention_bias") is False:
        found["attention_bias"] = True  # its projections have biases in any case
    rope = None if "rope_parameters" in known else _one_rope(found.get("rope_parameters"))
    if rope is not None:
        del found["rope_parameters"]
        for name in ("rope_theta", "partial_rotary_factor"):
            if rope.get(name) is not None:
                found[name] = rope[name]
            rope.pop(name, None)
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        found["rope_scaling"] = None if plain and "mrope_section" not in rope else rope
    return found


def fields(config: Mapping[str, Any], override_args: str | None = None) -> dict[str, Any]:
    """A config.json as engines read it, with overrides in the fields of transformers 4 or 5.

    Raises:
        InvalidConfig: The file or the overrides contradict themselves about rotary embeddings.
    """
    own = json_object("json_model_override_args", override_args)
    _check_one_rope(config, "config.json")
    _check_one_rope(own, "json_model_override_args")
    base = as_read(config)
    for new, old in _RENAMED.items():
        if new in own:  # else the file's value would count, under the old name
            base.pop(old, None)
    return as_read({**base, **own})


def overrides(config: Mapping[str, Any], given: str | None = None) -> str:
    """The `json_model_override_args` with which upstream reads a config.json correctly.

    Args:
        config: The configuration as it is written.
        given: The user's own overrides, in the fields of transformers 4 or 5. They come last.
    """
    own = json_object("json_model_override_args", given)
    meant = fields(config, given)
    changed = {name: value for name, value in meant.items() if not _same(config, name, value)}
    return json.dumps({**own, **changed})


def load(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    override_args: str | None = None,
) -> Any:
    """A checkpoint's configuration as an object of `transformers`, read as engines read it.

    Raises:
        InvalidConfig: It cannot be read, or transformers refuses it.
    """
    return parsed(fields(written(model, revision, download_dir), override_args), model)


def parsed(config: Mapping[str, Any], name: str = "the model") -> Any:
    """An object of `transformers` from the fields of a config.json. A family that the installed
    transformers does not know gets a plain one.

    Raises:
        InvalidConfig: transformers refuses it.
    """
    from transformers import PretrainedConfig

    try:
        return (_kind(config.get("model_type")) or PretrainedConfig).from_dict(as_read(config))
    except Exception as error:  # transformers raises anything
        raise InvalidConfig(f"{name}: the configuration cannot be read: {error}") from error


def _check_one_rope(config: Mapping[str, Any], where: str) -> None:
    """Refuse a `rope_scaling` that was added to a file of transformers 5 and contradicts its
    `rope_parameters`. Transformers 4 reads the one field, transformers 5 the other.
    """
    rope, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if not rope or not scaling:
        return
    alone = {name: value for name, value in config.items() if name != "rope_scaling"}
    if as_read(alone).get("rope_scaling") != as_read({**alone, "rope_parameters": scaling}).get(
        "rope_scaling"
    ):
        raise InvalidConfig(
            f"{where}: rope_scaling={shown(scaling)} and rope_parameters={shown(rope)} say "
            "different things; keep one of the two"
        )


def _one_rope(rope: Any) -> dict[str, Any] | None:
    """The rotary parameters of all layers. None if there are none, or if layers differ."""
    if not isinstance(rope, Mapping) or not rope:
        return None
    if not all(isinstance(value, Mapping) or value is None for value in rope.values()):
        return dict(rope)
    kinds = [dict(kind) for kind in rope.values() if kind is not None]
    return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else None


def _same(config: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in config and config[name] == value


def _constructor_fields(model_type: Any) -> frozenset[str]:
    """The named arguments of transformers' class for a family. Empty for an unknown family."""
    kind = _kind(model_type)
    return frozenset(inspect.signature(kind.__init__).parameters) if kind else frozenset()


def _kind(model_type: Any) -> Any:
    """transformers' configuration class for a family. Upstream registers its own there too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except (KeyError, TypeError):  # an unknown family, or none
        return None
