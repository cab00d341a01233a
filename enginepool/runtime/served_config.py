"""Checks that the config.json beside new weights describes the model that is served.

Weights of the same shapes may belong to another model: with another rotary base, another epsilon or
another end token. The engines keep the configuration that they were built from.
"""

from __future__ import annotations

from pathlib import Path

from enginepool.config import PoolConfig
from enginepool.errors import InvalidConfig, InvalidWeights
from enginepool.model_config.config_json import fields, load, parsed
from enginepool.model_config.unsupported import NOT_OF_THE_MODEL
from enginepool.values import shown

_MOST = 5


def check_config(directory: Path, config: PoolConfig) -> None:
    """Compare with what the engines were built from; a directory without config.json passes.

    Both are compared as engines read them: with the fields of the installed transformers, and with
    the pool's own overrides.

    Raises:
        InvalidWeights: They differ (the message has the names and both values), or the new one
            cannot be read.
    """
    if not (directory / "config.json").exists():
        return
    override = config.server_args.get("json_model_override_args")
    served = parsed(fields(config.written, override), config.model).to_dict()
    try:
        given = load(str(directory), override_args=override).to_dict()
    except InvalidConfig as error:
        raise InvalidWeights(f"{directory}/config.json cannot be read: {error}") from error
    names = sorted((served.keys() | given.keys()) - NOT_OF_THE_MODEL)
    wrong = [
        f"{name}={shown(given.get(name))} (served: {shown(served.get(name))})"
        for name in names
        if given.get(name) != served.get(name) and not name.startswith("_")
    ]
    if wrong:
        more = f" and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise InvalidWeights(
            f"{directory}/config.json does not fit the model that is served: "
            f"{'; '.join(wrong[:_MOST])}{more}; open a new pool for that model"
        )
