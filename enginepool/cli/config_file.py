"""`--config FILE`: the options of `serve` from a file. The command line overrides it."""

from __future__ import annotations

import tomllib
from datetime import date, time
from pathlib import Path
from typing import Any

import typer
import yaml

from enginepool.cli.server_args import FromFile
from enginepool.errors import InvalidConfig
from enginepool.values import shown

_KINDS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
_NOT_IN_A_FILE = {"config", "help_all"}
_REST = "enginepool.config_file"


def take(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager option. The file's values become the defaults of the command's own
    options. `left_to_upstream` returns the other values."""
    if path is None:
        return None
    own: dict[str, Any] = {one.name: one for one in context.command.params if one.name}
    defaults, rest = {}, {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name in defaults or name in rest:
            raise InvalidConfig(f"--config {path}: {name} is there twice")
        if name in own and name not in _NOT_IN_A_FILE:
            if value is not None:
                defaults[name] = _as_given(path, own[name], value)
        else:
            rest[name] = value
    context.default_map = defaults
    context.meta[_REST] = FromFile(path, rest, own.keys() - _NOT_IN_A_FILE)
    return path


def left_to_upstream(context: typer.Context) -> FromFile | None:
    return context.meta.get(_REST)


def _read(path: Path) -> dict[Any, Any]:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InvalidConfig(f"--config {path}: expected a name in {', '.join(_KINDS)}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
        found = tomllib.loads(text) if kind == "TOML" else yaml.load(text, _NoDuplicates)
    except OSError as error:
        raise InvalidConfig(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidConfig(f"--config {path}: this is not {kind}: {error}") from None
    if found is not None and not isinstance(found, dict):
        raise InvalidConfig(f"--config {path}: expected options by name, not {shown(found)}")
    # A value may look like a date, such as the name of a model.
    dates = date, time
    return {k: str(v) if isinstance(v, dates) else v for k, v in (found or {}).items()}


class _NoDuplicates(yaml.SafeLoader):
    """YAML without duplicate names. PyYAML alone would silently take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is there twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _as_given(path: Path, option: Any, value: Any) -> Any:
    """The value in the form of the command line: a list becomes `0,2,`. Only flags take true and
    false."""
    if isinstance(value, bool) != bool(option.is_flag):
        expected = "true or false" if option.is_flag else "its value"
        raise InvalidConfig(f"--config {path}: {option.name}={shown(value)}: expected {expected}")
    if isinstance(value, list):
        return "".join(f"{one}," for one in value)  # one id of a device is `2,`
    if isinstance(value, dict):
        raise InvalidConfig(f"--config {path}: {option.name}={shown(value)}: expected one value")
    return value
