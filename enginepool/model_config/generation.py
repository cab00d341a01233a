"""Reads a generation_config.json: end tokens, and the sampling parameters of calls without any.

Upstream ignores a file that it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from enginepool.errors import InvalidConfig
from enginepool.process.quiet import no_generation_warnings
from enginepool.values import is_int, shown

NAME = "generation_config.json"


def written_generation(model: str, revision: str | None = None) -> dict[str, Any]:
    """The fields of a checkpoint's generation_config.json, as they are written. Empty without a
    file.

    Raises:
        InvalidConfig: It cannot be read, or transformers, and upstream with it, refuses it.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    try:
        place = cached_file(model, NAME, revision=revision)
    except OSError:  # no such file; or no network, and then loading the model fails by itself
        return {}
    if place is None:
        return {}
    try:
        found = json.loads(Path(place).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise InvalidConfig(f"{model}: {NAME} holds {shown(found)}: expected an object")
        check_ends(found, f"{model}: {NAME}")
        with no_generation_warnings():
            GenerationConfig.from_dict(found)
    except InvalidConfig:
        raise
    except Exception as error:  # transformers raises anything
        raise InvalidConfig(
            f"{model}: {NAME} cannot be read: {error}; correct it or remove it"
        ) from error
    return found


def check_ends(config: Mapping[str, Any], file: str) -> None:
    """Check that the end tokens that a file names are ids.

    Raises:
        InvalidConfig: They are not, so they would end no output.
    """
    ends = config.get("eos_token_id")
    if ends is None or is_int(ends) or (isinstance(ends, list) and all(map(is_int, ends))):
        return
    raise InvalidConfig(
        f"{file}: eos_token_id={shown(ends)}: expected a token id or a list of them; correct it"
    )


def end_ids(named: Iterable[int] | None, tokenizer: Any) -> set[int]:
    """The ids that end an output, without those that its caller names.

    Args:
        named: The ids of the two files, as upstream's `hf_eos_token_id` and `eos_token_ids`.
        tokenizer: The tokenizer that upstream loads, with its `additional_stop_token_ids`; or None.
    """
    ends = {*(named or ())}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return {int(end) for end in ends if end is not None and end >= 0}
