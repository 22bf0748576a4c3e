"""Checks of a chat's tools, calls and results, by the names of gRPC."""

from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.text.conversation import conversation_of
from services.runtime.errors import InvalidField

CALL = {"id": "1", "name": "f", "arguments": "{}"}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("chat", "field", "fault"),
    [
        (
            {"tools": [{"name": "f", "parameters": '{"type": "array", "type": "object"}'}]},
            "tools[0].parameters",
            ": the key 'type' is duplicated in one object",
        ),
        ({"template_variables": '{"a": 1, "a": 2}'}, "template_variables", ": the key 'a' is duplicated in one object"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, "tools[1].name", ' is that of prompt.chat.tools[0], too: "f"'),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0].tool_calls", " requires the role "),
        (
            {"messages": [CALLING], "continue_final_message": True},
            "continue_final_message",
            " cannot continue a message that has tool_calls",
        ),
    ],
)
def test_an_inconsistent_chat_is_refused_by_field(chat: dict[str, Any], field: str, fault: str) -> None:
    with pytest.raises(InvalidField) as caught:
        conversation_of(gateway_pb2.Chat(**chat))
    assert caught.value.field == f"prompt.chat.{field}"
    assert str(caught.value).startswith(f"prompt.chat.{field}{fault}")


def test_the_last_of_equal_keys_in_earlier_arguments_counts() -> None:
    call = CALL | {"arguments": '{"a": 1, "a": 2}'}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "5"}]
    conversation = conversation_of(gateway_pb2.Chat(messages=messages))
    assert conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
