"""Converts the body of /v1/responses to that of a chat."""

from services.gateway.http.json_types import Schema
from services.gateway.http.openai import requests
from services.gateway.http.openai.responses_api.input_items import InputConversation
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest, TextFormat
from services.gateway.http.openai.responses_api.response_tools import ResponseTools
from services.runtime.errors import InvalidField


def chat_body(
    body: ResponsesRequest, conversation: InputConversation, tools: ResponseTools
) -> requests.ChatCompletionRequest:
    """Return the chat of a request. Raises InvalidField."""
    if body.top_logprobs and not body.wants_logprobs:
        message = "top_logprobs requires 'message.output_text.logprobs' in include"
        raise InvalidField(message, "top_logprobs")
    shared = {name: getattr(body, name) for name in requests.GenerationRequest.model_fields}
    chat = shared | {
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "tools": [tool.as_function() for tool in tools.offered],
        "tool_choice": tools.choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": _template_variables(body),
        "stream_options": None,
    }
    return requests.ChatCompletionRequest.model_construct(**chat)


def _template_variables(body: ResponsesRequest) -> Schema | None:
    """Return the variables of the template. Those that the client gives by their names win."""
    verbosity = body.text.verbosity if body.text else None
    given = body.chat_template_kwargs
    return given if verbosity is None else {"verbosity": verbosity, **(given or {})}


def _response_format(given: TextFormat) -> requests.ResponseFormat:
    has_schema, needs_schema = given.schema_ is not None, given.type == "json_schema"
    if has_schema != needs_schema:
        fault = "is missing" if needs_schema else "requires type 'json_schema'"
        raise InvalidField(f"text.format.schema {fault}", "text.format.schema")
    schema = {"name": given.name or "", "schema": given.schema_} if needs_schema else None
    return requests.ResponseFormat.model_validate({"type": given.type, "json_schema": schema})
