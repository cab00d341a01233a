"""Messages as clients write them get the form that templates take, and nothing else of them
changes."""

from typing import Any

import pytest

from enginepool.serve.chat_messages import as_turns


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": {"b": 1, "a": "é"}}}]},
            {"role": "assistant",
             "tool_calls": [{"function": {"arguments": '{"b": 1, "a": "é"}'}}]},
        ),
        ({"role": "user", "content": [{"type": "refusal"}]}, None),
        ({"role": "assistant", "content": "1", "tool_calls": [3, {"function": 4}]}, None),
        (5, None),
    ],
)  # fmt: skip
def test_turns(sent: Any, taken: Any) -> None:
    assert as_turns([sent]) == [sent if taken is None else taken]
