"""Converts the body of /v1/messages to that of a chat."""

from typing import Any

from services.gateway.http.anthropic.conversation import MessageConversation
from services.gateway.http.anthropic.request_schemas import JsonOutputFormat, MessageFields
from services.gateway.http.anthropic.tool_schemas import ClientTool
from services.gateway.http.openai import requests
from services.runtime.errors import InvalidField


def chat_body(body: MessageFields, conversation: MessageConversation) -> requests.ChatCompletionRequest:
    """Return the chat of a request. Raises InvalidField."""
    shared = {name: getattr(body, name) for name in requests.GenerationRequest.model_fields}
    answer_format = _format(body)
    chat = shared | {
        "messages": conversation.messages,
        "continue_final_message": conversation.continues_answer or None,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tools": [_tool(tool) for tool in body.tools or () if isinstance(tool, ClientTool)],
        "tool_choice": _choice(body),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "thinking": _thinking(body),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "response_format": _response_format(answer_format) if answer_format else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return requests.ChatCompletionRequest.model_construct(**chat)


def _tool(tool: ClientTool) -> requests.Tool:
    schema = tool.input_schema
    if tool.input_examples:
        schema = {"examples": tool.input_examples, **schema}
    function = {"name": tool.name, "description": tool.description, "parameters": schema, "strict": tool.strict}
    return requests.Tool.model_validate({"type": "function", "function": function})


def _choice(body: MessageFields) -> Any:
    """Return the `tool_choice` of a chat. Raises InvalidField."""
    choice = body.tool_choice
    if choice is None:
        return None
    if (choice.name is None) == (choice.type == "tool"):
        fault = "is missing" if choice.name is None else "requires the type 'tool'"
        raise InvalidField(f"tool_choice.name {fault}", "tool_choice.name")
    if choice.type in ("auto", "none"):
        return choice.type
    names = [tool.name for tool in body.tools or () if isinstance(tool, ClientTool)]
    if not names:
        raise InvalidField(f"tool_choice.type is {choice.type!r}, but tools is empty", "tool_choice.type")
    if choice.name is None:
        return "required"
    if choice.name not in names:
        raise InvalidField(f"tool_choice.name {choice.name[:100]!r} is not in tools", "tool_choice.name")
    return requests.NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})


def _thinking(body: MessageFields) -> requests.Thinking | None:
    given = body.thinking
    if given is None:
        return None
    if given.budget_tokens is not None and given.type != "enabled":
        raise InvalidField("thinking.budget_tokens requires the type 'enabled'", "thinking.budget_tokens")
    return requests.Thinking.model_validate({"type": given.type, "budget_tokens": given.budget_tokens})


def _format(body: MessageFields) -> JsonOutputFormat | None:
    given = body.output_config.format if body.output_config else None
    if given and body.output_format:
        raise InvalidField("output_format cannot be combined with output_config.format", "output_format")
    return given or body.output_format


def _response_format(given: JsonOutputFormat) -> requests.ResponseFormat:
    schema = {"name": "answer", "schema": given.schema_}
    return requests.ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})
