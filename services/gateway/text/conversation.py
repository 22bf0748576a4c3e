"""Converts a client's chat to the input of a chat template."""

import json
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.text.chat_template import Conversation
from services.runtime.errors import InvalidField

_NO_ARGUMENTS = {"type": "object", "properties": {}}


def conversation_of(chat: gateway_pb2.Chat) -> Conversation:
    """Convert a chat. Raises InvalidField for arguments that are not a JSON object and for empty names."""
    messages = [_message(message, f"prompt.chat.messages[{at}]") for at, message in enumerate(chat.messages)]
    return Conversation(messages, [_tool(tool, f"prompt.chat.tools[{at}]") for at, tool in enumerate(chat.tools)])


def _message(message: gateway_pb2.ChatMessage, path: str) -> dict[str, Any]:
    # Templates test whether a key is present, so empty fields are left out.
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name:
        rendered["name"] = message.name
    return rendered


def _call(call: gateway_pb2.ToolCall, path: str) -> dict[str, Any]:
    _check_named(call.name, path)
    arguments = _json_object(call.arguments or "{}", f"{path}.arguments")
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: gateway_pb2.Tool, path: str) -> dict[str, Any]:
    _check_named(tool.name, path)
    parameters = _json_object(tool.parameters, f"{path}.parameters") if tool.parameters else _NO_ARGUMENTS
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _check_named(name: str, path: str) -> None:
    if not name:
        raise InvalidField(f"{path}.name must not be empty", f"{path}.name")


def _json_object(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{path} is not valid JSON: {error}", path) from error
    if not isinstance(value, dict):
        raise InvalidField(f"{path} must be a JSON object", path)
    return value
