"""Translates the messages and tools of a chat to the gateway's message."""

import json
from collections.abc import Sequence
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.http.member_policy import ANYWHERE
from services.gateway.http.openai import requests
from services.runtime.errors import InvalidField, UnsupportedField

# The names that templates have for a switch of thoughts.
_SWITCHES = ("enable_thinking", "thinking")
# Of image-text models too, whose clients may not see why.
_TEXT_ONLY = ": Quire's models read text only"


def chat(
    messages: Sequence[requests.ChatMessage],
    tools: Sequence[requests.Tool],
    template: requests.ChatTemplateFields,
) -> gateway_pb2.Chat:
    """Translate a conversation. Raises InvalidField or UnsupportedField."""
    variables = _variables(template)
    return gateway_pb2.Chat(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(messages)],
        tools=[_tool(tool) for tool in tools],
        template_variables=json.dumps(variables, ensure_ascii=False) if variables else "",
        add_generation_prompt=template.add_generation_prompt,
        continue_final_message=template.continue_final_message,
    )


def _variables(template: requests.ChatTemplateFields) -> dict[str, Any]:
    """Return the variables of the template. Those that the client gives by their names win."""
    effort, switch = template.reasoning_effort, _switch(template)
    variables: dict[str, Any] = {} if switch is None else dict.fromkeys(_SWITCHES, switch)
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if template.verbosity is not None:
        variables["verbosity"] = template.verbosity
    return variables | (template.chat_template_kwargs or {})


def _switch(template: requests.ChatTemplateFields) -> bool | None:
    """Return whether the model thinks, as the most exact of the fields says it; None leaves it to the template."""
    if template.enable_thinking is not None:
        return template.enable_thinking
    if template.thinking is not None and template.thinking.type != "adaptive":
        return template.thinking.type == "enabled"
    return None if template.reasoning_effort is None else template.reasoning_effort != "none"


def _message(message: requests.ChatMessage, path: str) -> gateway_pb2.ChatMessage:
    reasoning = message.reasoning_content or message.reasoning or ""
    if message.content is None and not message.tool_calls and not reasoning:
        raise InvalidField(f"{path}.content is missing", f"{path}.content")
    return gateway_pb2.ChatMessage(
        role=message.role,
        content="" if message.content is None else _text(message.content, f"{path}.content"),
        no_content=message.content is None and bool(message.tool_calls),
        reasoning=reasoning,
        tool_calls=[
            gateway_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "")
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(content: str | list[requests.ContentPart], path: str) -> str:
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedField(
                f"{path}[{at}].type must be 'text', not {part.type!r}{_TEXT_ONLY}", f"{path}[{at}].type"
            )
        if part.text is None:
            raise InvalidField(f"{path}[{at}].text is missing", f"{path}[{at}].text")
        extra = part.model_extra or {}
        if unknown := [name for name, value in extra.items() if value is not None and name not in ANYWHERE]:
            raise UnsupportedField(f"{path}[{at}].{unknown[0]} is not supported", f"{path}[{at}].{unknown[0]}")
    return "\n".join(part.text or "" for part in content)


def _tool(tool: requests.Tool) -> gateway_pb2.Tool:
    function = tool.function
    parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return gateway_pb2.Tool(name=function.name, description=function.description or "", parameters=parameters)
