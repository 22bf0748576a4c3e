"""Converts a client's chat to the input of a chat template."""

import json
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.text.chat_template import Conversation
from services.gateway.text.tool_choice import check_arguments_schema, check_names
from services.runtime.errors import InvalidField
from services.runtime.http.json_body import MAX_DEPTH, parse_text
from services.runtime.http.validation import shown

_NO_ARGUMENTS = {"type": "object", "properties": {}}
_MAX_MESSAGES = 8192
_MAX_TOOLS = 1024
_MAX_ROLE_LENGTH = 64
_MAX_VARIABLE_BYTES = 16 * 1024


def conversation_of(chat: gateway_pb2.Chat) -> Conversation:
    """Convert a chat. Raises InvalidField."""
    _check_count("prompt.chat.messages", len(chat.messages), _MAX_MESSAGES)
    _check_count("prompt.chat.tools", len(chat.tools), _MAX_TOOLS)
    messages = [_message(message, f"prompt.chat.messages[{at}]") for at, message in enumerate(chat.messages)]
    tools = [_tool(tool, f"prompt.chat.tools[{at}]") for at, tool in enumerate(chat.tools)]
    _check_calls(chat)
    _check_tool_names(chat)
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if chat.continue_final_message:
        _check_continuation(chat)
    return Conversation(messages, tools, _variables(chat), opens, chat.continue_final_message)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidField(f"{field} must have at most {most} entries, not {count}", field)


def _check_continuation(chat: gateway_pb2.Chat) -> None:
    field = "prompt.chat.continue_final_message"
    if chat.add_generation_prompt:
        raise InvalidField(f"{field} cannot be combined with prompt.chat.add_generation_prompt", field)
    if chat.messages and chat.messages[-1].role != "assistant":
        raise InvalidField(f"{field} needs a last message of the role 'assistant'", field)
    if chat.messages and chat.messages[-1].tool_calls:
        raise InvalidField(f"{field} cannot continue a message that has tool_calls", field)


def _check_calls(chat: gateway_pb2.Chat) -> None:
    """Check that calls are the assistant's."""
    for at, message in enumerate(chat.messages):
        if message.tool_calls and message.role != "assistant":
            path = f"prompt.chat.messages[{at}].tool_calls"
            raise InvalidField(f"{path} requires the role 'assistant', not {shown(message.role)}", path)


def _check_tool_names(chat: gateway_pb2.Chat) -> None:
    check_names([tool.name for tool in chat.tools], "prompt.chat.tools")


def _variables(chat: gateway_pb2.Chat) -> dict[str, Any]:
    field, size = "prompt.chat.template_variables", len(chat.template_variables.encode())
    if size > _MAX_VARIABLE_BYTES:
        raise InvalidField(f"{field} must have at most {_MAX_VARIABLE_BYTES} bytes, not {size}", field)
    return _json_object(chat.template_variables, field) if size else {}


def _message(message: gateway_pb2.ChatMessage, path: str) -> dict[str, Any]:
    if not 1 <= len(message.role) <= _MAX_ROLE_LENGTH:
        fault = f"must have between 1 and {_MAX_ROLE_LENGTH} characters, not {len(message.role)}"
        raise InvalidField(f"{path}.role {fault}", f"{path}.role")
    # Templates test whether a key is present, so empty fields are left out.
    rendered: dict[str, Any] = {"role": message.role}
    if not message.no_content:
        rendered["content"] = message.content
    elif message.content or not message.tool_calls:
        raise InvalidField(f"{path}.no_content requires tool_calls, and no content", f"{path}.no_content")
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name:
        rendered["name"] = message.name
    if message.reasoning:
        if message.role != "assistant":
            fault = f"requires the role 'assistant', not {shown(message.role)}"
            raise InvalidField(f"{path}.reasoning {fault}", f"{path}.reasoning")
        rendered["reasoning"] = message.reasoning
    return rendered


def _call(call: gateway_pb2.ToolCall, path: str) -> dict[str, Any]:
    _check_named(call.name, path)
    arguments = _arguments(call.arguments)
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """Return the arguments of an earlier call; text that is no JSON object, as models write it at times, unchanged.

    The last of equal keys counts.
    """
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # includes an unpaired surrogate
        return text
    return value if isinstance(value, dict) and not _is_deeper(value, MAX_DEPTH) else text


def _tool(tool: gateway_pb2.Tool, path: str) -> dict[str, Any]:
    _check_named(tool.name, path)
    parameters = _json_object(tool.parameters, f"{path}.parameters") if tool.parameters else _NO_ARGUMENTS
    check_arguments_schema(parameters, f"{path}.parameters")
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _check_named(name: str, path: str) -> None:
    if not name:
        raise InvalidField(f"{path}.name must not be empty", f"{path}.name")


def _json_object(text: str, path: str) -> dict[str, Any]:
    value = parse_text(text, path)
    if not isinstance(value, dict):
        raise InvalidField(f"{path} must be a JSON object", path)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (not levels or any(_is_deeper(one, levels - 1) for one in inner))
