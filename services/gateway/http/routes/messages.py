"""The endpoints of Anthropic's Messages API."""

from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.http.anthropic import response_schemas
from services.gateway.http.anthropic.conversation import Conversation
from services.gateway.http.anthropic.error_format import OVERLOADED, OWN_REQUEST_ID
from services.gateway.http.anthropic.field_names import MessageFieldNames
from services.gateway.http.anthropic.message_call import MessageCall
from services.gateway.http.anthropic.request_schemas import CountTokensRequest, MessageFields, MessagesRequest
from services.gateway.http.json_request import ApiRoute
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.request_ids import id_headers
from services.gateway.http.routes.context import handler_of, json_response, origin_of
from services.gateway.http.routes.descriptions import ERRORS, event_stream
from services.runtime.http.disconnect import while_connected
from services.runtime.http.server_sent_events import ServerSentEvents

_EVENTS = event_stream("An event as JSON, from `message_start` to `message_stop` or `error`.")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": response_schemas.MessageError} for status, described in ERRORS.items()
}
_ERRORS[400] |= {"description": "The request is invalid; the message names the field."}
_ERRORS[429] |= {"description": "The tenant is at a limit. Retry after `Retry-After`."}
_ERRORS[OVERLOADED] = {**_ERRORS[429], "description": "The queue is full. Retry after `Retry-After`."}

router = APIRouter(route_class=ApiRoute, responses=_ERRORS)


@router.post("/v1/messages", responses={200: {"model": response_schemas.MessageBody, "content": _EVENTS}})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Generate the next message of a conversation, in Anthropic's format."""
    call = _call(body, request)
    headers = _headers(call, request)
    if not body.stream:
        return json_response(await while_connected(request.receive, call.complete()), headers)
    events = call.stream()
    first = await while_connected(request.receive, anext(events))
    return ServerSentEvents(first, events, {"cache-control": "no-cache", **headers})


@router.post("/v1/messages/count_tokens", responses={200: {"model": response_schemas.TokensCount}})
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of the prompt that a conversation becomes."""
    call = _call(body, request)
    headers = _headers(call, request)
    return json_response({"input_tokens": await call.count_tokens()}, headers)


def _call(body: MessageFields, request: Request) -> MessageCall:
    """Translate the body, with its own names of the fields in errors. Raises InvalidField or UnsupportedField."""
    conversation = Conversation(body)
    request.state.field_names = MessageFieldNames.of(body, conversation.origins, FieldNames())
    call = MessageCall(handler_of(request), origin_of(request), body, conversation)
    request.state.field_names = call.translated.field_names
    request.state.request_id = call.translated.request_id
    return call


def _headers(call: MessageCall, request: Request) -> dict[str, str]:
    own_id = call.translated.request_id
    return {**id_headers(request, own_id), OWN_REQUEST_ID: own_id}
