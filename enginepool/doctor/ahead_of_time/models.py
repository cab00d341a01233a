"""Shapes of models to compile, as in the configurations that their authors publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.values import did_you_mean

_FOLDER = Path(__file__).parents[1] / "models"
MODELS = sorted(file.stem for file in _FOLDER.glob("*.json"))


def model_config(name: str, layers: int | None) -> dict[str, Any]:
    """The configuration of a model from the list or from a folder, cut to so many layers.

    Raises:
        InvalidConfig: There is none.
    """
    path = _FOLDER / f"{name}.json" if name in MODELS else Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = did_you_mean(name, MODELS)
        raise InvalidConfig(
            f"model={name!r}: neither a config.json ({error}) nor one of {', '.join(MODELS)}" + hint
        ) from None
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config
