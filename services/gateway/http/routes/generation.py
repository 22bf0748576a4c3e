"""The endpoints that generate."""

from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.http import error_responses
from services.gateway.http.events import EventStream
from services.gateway.http.json_request import ApiRoute
from services.gateway.http.openai import requests, responses
from services.gateway.http.openai.chats import ChatCompletionCall
from services.gateway.http.openai.completions import CompletionCall
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.openai.responses_api import response_schemas
from services.gateway.http.openai.responses_api.input_items import InputConversation, InputFieldNames
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest
from services.gateway.http.openai.responses_api.response_call import ResponseCall
from services.gateway.http.openai.responses_api.response_tools import ResponseTools
from services.gateway.http.request_ids import id_headers
from services.gateway.http.routes.context import handler_of, json_response, origin_of
from services.gateway.http.routes.descriptions import ERRORS, event_stream
from services.runtime.errors import ServiceError
from services.runtime.http.disconnect import while_connected
from services.runtime.http.server_sent_events import ServerSentEvents

_CHUNKS = event_stream("A chunk or an error as JSON; the last event is `[DONE]`.")

_RESPONSE_EVENTS = event_stream("An event as JSON, from `response.created` to the end of the response.")

router = APIRouter(route_class=ApiRoute, responses=ERRORS)


@router.post("/v1/completions", responses={200: {"model": responses.Completion, "content": _CHUNKS}})
async def complete(body: requests.CompletionRequest, request: Request) -> Response:
    """Complete one or more prompts."""
    call = CompletionCall(handler_of(request), origin_of(request), body)
    return await _respond(call, request, stream=bool(body.stream))


@router.post("/v1/chat/completions", responses={200: {"model": responses.ChatCompletion, "content": _CHUNKS}})
async def complete_chat(body: requests.ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    call = ChatCompletionCall(handler_of(request), origin_of(request), body)
    return await _respond(call, request, stream=bool(body.stream))


@router.post("/v1/completions/render", responses={200: {"model": list[responses.RenderedPrompt]}})
async def render(body: requests.CompletionRequest, request: Request) -> Response:
    """Return the token ids of the prompts that a completion would compute, without a generation."""
    return await _rendered(CompletionCall(handler_of(request), origin_of(request), body), request)


@router.post("/v1/chat/completions/render", responses={200: {"model": responses.RenderedPrompt}})
async def render_chat(body: requests.ChatCompletionRequest, request: Request) -> Response:
    """Return the token ids of the prompt that a chat would compute, without a generation."""
    return await _rendered(ChatCompletionCall(handler_of(request), origin_of(request), body), request)


@router.post("/v1/responses", responses={200: {"model": response_schemas.ResponseBody, "content": _RESPONSE_EVENTS}})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Generate a response to an input. Nothing is stored."""
    return await _respond(_response_call(body, request), request, stream=bool(body.stream))


@router.post("/v1/responses/input_tokens", responses={200: {"model": response_schemas.InputTokenCount}})
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Count the tokens of an input, without a generation."""
    call = _response_call(body, request)
    request.state.field_names = call.translated.field_names
    return json_response(await call.count_tokens())


def _response_call(body: ResponsesRequest, request: Request) -> ResponseCall:
    """Translate the body of a response. Raises InvalidField or UnsupportedField with the names of the body."""
    conversation, tools = InputConversation(body), ResponseTools.of(body)
    request.state.field_names = InputFieldNames.of(conversation, tools, FieldNames())  # until the body is translated
    return ResponseCall(handler_of(request), origin_of(request), body, conversation, tools)


async def _rendered(call: CompletionCall | ChatCompletionCall, request: Request) -> Response:
    request.state.field_names = call.translated.field_names
    return json_response(await while_connected(request.receive, call.render()))


async def _respond(call: CompletionCall | ChatCompletionCall, request: Request, *, stream: bool) -> Response:
    """Generate while the client is connected. The first chunk is sent when the generation starts."""
    names = request.state.field_names = call.translated.field_names
    request.state.request_id = call.translated.request_id
    headers = id_headers(request, call.translated.request_id)
    if not stream:
        return json_response(await while_connected(request.receive, call.complete()), headers)
    events = call.stream()
    first = await while_connected(request.receive, anext(events))
    if isinstance(call, ResponseCall):  # its last event says how it ended
        return ServerSentEvents(first, events, {"cache-control": "no-cache", **headers})
    return EventStream(first, events, lambda error: _stream_error(error, names), headers)


def _stream_error(error: Exception, names: FieldNames) -> dict[str, Any]:
    if isinstance(error, ServiceError):
        return error_responses.error_body(error, names)
    return error_responses.internal_error_body(error)
