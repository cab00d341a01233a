"""What ends an output, whoever names it: config.json, generation_config.json or the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def end_ids(named: Iterable[int] | None, tokenizer: Any) -> set[int]:
    """The ids that end an output, but for those that its caller names.

    Args:
        named: Those of the two files, as upstream's `hf_eos_token_id` and `eos_token_ids` are.
        tokenizer: The one that upstream loads, with its `additional_stop_token_ids`; or None.
    """
    ends = {*(named or ())}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return {int(end) for end in ends if end is not None and end >= 0}
