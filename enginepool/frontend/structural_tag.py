"""Structural tags: free text, in which JSON that fits a schema follows each trigger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginepool.frontend.schema_limits import check_schema
from enginepool.values import shown

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_FORM = (
    'expected {"type": "structural_tag", "structures": [{"begin": ..., "schema": {...}, '
    '"end": ...}], "triggers": [...]}'
)


def structural_tag_grammar(tag: Any, vocabulary: LLTokenizer) -> str:
    """The grammar of a structural tag, in llguidance's form.

    Raises:
        ValueError: The tag has another form, or a structure begins with none of the triggers.
    """
    from llguidance import StructTag

    structures, triggers = _parts(tag)
    for structure in structures:
        check_schema(structure["schema"])
    tags = [
        StructTag(
            trigger=_trigger(structure["begin"], triggers),
            begin=structure["begin"],
            grammar=structure["schema"],
            end=structure["end"],
        )
        for structure in structures
    ]
    special = {_is_special(tag.trigger, vocabulary) for tag in tags}
    bracketed = {tag.trigger.startswith("<") and tag.trigger.endswith(">") for tag in tags}
    if len(special) > 1 and True in bracketed:
        raise ValueError("triggers: either all or none may be special tokens")
    return StructTag.to_grammar(tags, assume_special=special == {True})


def _parts(tag: Any) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
    structures, triggers = (tag.get(name) for name in ("structures", "triggers"))
    if tag.keys() - {"type", "structures", "triggers"} or not (structures and triggers):
        raise ValueError(_FORM)
    if not (isinstance(triggers, list) and all(isinstance(t, str) and t for t in triggers)):
        raise ValueError(_FORM)
    if not (isinstance(structures, list) and all(map(_is_structure, structures))):
        raise ValueError(_FORM)
    return structures, triggers


def _is_structure(structure: Any) -> bool:
    return (
        isinstance(structure, dict)
        and structure.keys() == {"begin", "schema", "end"}
        and all(isinstance(structure[name], str) for name in ("begin", "end"))
        and isinstance(structure["schema"], dict)
    )


def _trigger(begin: str, triggers: Sequence[str]) -> str:
    fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not fitting:
        raise ValueError(f"begin={shown(begin)} begins with none of the triggers {triggers}")
    return max(fitting, key=len)


def _is_special(trigger: str, vocabulary: LLTokenizer) -> bool:
    """Whether the trigger is a special token, and not text."""
    ids = vocabulary.tokenize_str(trigger, parse_special=True)
    return len(ids) == 1 and vocabulary.is_special_token(ids[0])
