"""Reading a config.json, whichever transformers wrote it.

The installed transformers, and upstream with it, read the fields of transformers 4. Transformers 5
writes some under other names, and the old ones silently take their defaults: `rope_theta` 10000,
128 experts. `as_read` is the one translation. Engines get it as upstream's own
`json_model_override_args`, so that nothing of upstream is replaced for it; what reads a
configuration on our side reads it through `load`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.model_config import ARCHITECTURES
from enginepool.values import json_object, shown

# What transformers 5 calls a field, and what an older configuration class does.
_RENAMED = {"num_local_experts": "num_experts"}


def written(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, as they are written.

    Args:
        model: A directory, a config.json or a hub id, whose configuration alone is fetched.

    Raises:
        InvalidConfig: There is none to be read.
    """
    from transformers import PretrainedConfig

    try:
        found, _ = PretrainedConfig.get_config_dict(
            model, revision=revision, cache_dir=download_dir
        )
    except Exception as error:  # transformers and the hub raise what they like
        raise InvalidConfig(f"{model}: no configuration to be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{model}: config.json holds {shown(found)}: expected an object")
    if not found:  # so transformers has it of a directory without one
        raise InvalidConfig(
            f"{model}: no configuration to be read: no config.json, or an empty one"
        )
    return found


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration in the fields that the installed transformers and upstream read.

    What is in those already stays as it is. Rotary embeddings that differ from layer to layer have
    no such fields; they stay in `rope_parameters`.
    """
    found = dict(config)
    family = str(found.get("model_type"))
    known = _constructor_fields(family)
    named = found.get("architectures") or ()
    if family in ARCHITECTURES and not any(str(name).endswith("ForCausalLM") for name in named):
        found["architectures"] = [ARCHITECTURES[family]]  # transformers goes by model_type alone
    for new, old in _RENAMED.items():
        if new in found and new not in known and old in known:
            found.setdefault(old, found[new])
            del found[new]
    if family == "qwen2" and found.get("attention_bias") is False:
        found["attention_bias"] = True  # its projections have biases, whatever this says
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
    """A config.json as engines read it, under overrides in the fields of either transformers.

    Raises:
        InvalidConfig: One of the two says two things of rotary embeddings.
    """
    own = json_object("json_model_override_args", override_args)
    _check_one_rope(config, "config.json")
    _check_one_rope(own, "json_model_override_args")
    return as_read({**as_read(config), **own})


def overrides(config: Mapping[str, Any], given: str | None = None) -> str:
    """What upstream's `json_model_override_args` must be for it to read a config.json right.

    Args:
        config: As it is written.
        given: The user's own overrides, in the fields of either transformers. They come last.
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
        InvalidConfig: There is none to be read, or transformers refuses it.
    """
    return parsed(fields(written(model, revision, download_dir), override_args), model)


def parsed(config: Mapping[str, Any], name: str = "the model") -> Any:
    """An object of `transformers` from the fields of a config.json; a plain one for a family that
    the installed transformers does not know.

    Raises:
        InvalidConfig: transformers refuses it.
    """
    from transformers import PretrainedConfig

    try:
        return (_kind(config.get("model_type")) or PretrainedConfig).from_dict(as_read(config))
    except Exception as error:  # transformers raises what it likes
        raise InvalidConfig(f"{name}: no configuration to be read: {error}") from error


def _check_one_rope(config: Mapping[str, Any], where: str) -> None:
    """Refuse a `rope_scaling` that somebody added to what transformers 5 wrote: each transformers
    reads one of the two fields, and not the same one."""
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
    """The parameters of all layers; None if there are none, or several kinds."""
    if not isinstance(rope, Mapping) or not rope:
        return None
    if not all(isinstance(value, Mapping) or value is None for value in rope.values()):
        return dict(rope)
    kinds = [dict(kind) for kind in rope.values() if kind is not None]
    return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else None


def _same(config: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in config and config[name] == value


def _constructor_fields(model_type: Any) -> frozenset[str]:
    """What transformers' class for a family takes by name; nothing for one that it lacks."""
    kind = _kind(model_type)
    return frozenset(inspect.signature(kind.__init__).parameters) if kind else frozenset()


def _kind(model_type: Any) -> Any:
    """transformers' configuration class for a family; upstream adds its own to them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except (KeyError, TypeError):  # none of that name, or no name
        return None
