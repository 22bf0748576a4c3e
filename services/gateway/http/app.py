"""The HTTP API's endpoints and their OpenAPI description."""

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.v1 import gateway_pb2
from services.gateway.access.callers import ANONYMOUS, Origin
from services.gateway.http import error_responses
from services.gateway.http.error_responses import REQUEST_ID
from services.gateway.http.events import EventStream
from services.gateway.http.json_request import ApiRoute, Authenticate
from services.gateway.http.openai import requests, responses
from services.gateway.http.openai.chats import ChatCompletionCall
from services.gateway.http.openai.completions import CompletionCall
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.openai.messages import chat
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import InvalidField, ServiceError, Unavailable
from services.runtime.http.disconnect import while_connected
from services.runtime.service import Readiness

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.Error, "description": meaning}
    for status, meaning in {
        400: "The request is invalid; `param` names the field.",
        401: "The API key is missing, invalid or expired.",
        403: "The API key does not permit the request.",
        404: "The model is not served.",
        408: "The client sent the request or read the response too slowly.",
        409: "The request id is in use.",
        413: "The body is too large.",
        415: "The body is not plain JSON.",
        429: "The queue is full, or the tenant is at a limit. Retry after `Retry-After`.",
        431: "The headers are too large.",
        500: "Internal server error.",
        503: "The gateway is draining, or no engine of the model is ready.",
        504: "Deadline exceeded, in the queue or while running; the message names which.",
    }.items()
}
_ERRORS[429]["headers"] = {
    name: {"description": meaning, "required": True, "schema": {"type": "integer", "minimum": 1}}
    for name, meaning in (
        ("Retry-After", "Seconds to wait before a retry."),
        ("Retry-After-Ms", "Milliseconds to wait before a retry."),
    )
}
_EVENT = {
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "A chunk or an error as JSON; the last event is `[DONE]`."}
    },
    "required": ["data"],
}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}

router = APIRouter(route_class=ApiRoute, responses=_ERRORS)
open_router = APIRouter()


def make_app(
    handler: RequestHandler, readiness: Readiness, authenticate: Authenticate = lambda _: ANONYMOUS
) -> FastAPI:
    """Build the application. `authenticate` maps a value of `Authorization` to its caller, or raises ServiceError."""
    app = FastAPI(
        title="Quire",
        version=_version(),
        description="OpenAI's API with vLLM's extensions.",
        redirect_slashes=False,
    )
    app.state.handler = handler
    app.state.readiness = readiness
    app.state.authenticate = authenticate
    app.add_exception_handler(ServiceError, error_responses.on_service_error)
    app.add_exception_handler(HTTPException, error_responses.on_http_error)
    app.add_exception_handler(RequestValidationError, error_responses.on_validation_error)
    app.add_exception_handler(Exception, error_responses.on_unexpected_error)
    app.include_router(router)
    app.include_router(open_router)
    _remove_validation_responses(app)
    return app


@router.post("/v1/completions", responses={200: {"model": responses.Completion, "content": _EVENTS}})
async def complete(body: requests.CompletionRequest, request: Request) -> Response:
    """Complete one or more prompts."""
    call = CompletionCall(_handler(request), _origin(request), body, request.headers.get(REQUEST_ID))
    return await _respond(call, request, stream=bool(body.stream))


@router.post("/v1/chat/completions", responses={200: {"model": responses.ChatCompletion, "content": _EVENTS}})
async def complete_chat(body: requests.ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    call = ChatCompletionCall(_handler(request), _origin(request), body, request.headers.get(REQUEST_ID))
    return await _respond(call, request, stream=bool(body.stream))


async def _respond(call: CompletionCall | ChatCompletionCall, request: Request, *, stream: bool) -> Response:
    """Generate while the client is connected. The first chunk is sent when the generation starts."""
    names = request.state.field_names = call.translated.field_names
    request.state.request_id = call.translated.request_id
    headers = {REQUEST_ID: call.translated.request_id}
    if not stream:
        return _json(await while_connected(request.receive, call.complete()), headers)
    events = call.stream()
    first = await while_connected(request.receive, anext(events))
    return EventStream(first, events, lambda error: _stream_error(error, names), headers)


def _stream_error(error: Exception, names: FieldNames) -> dict[str, Any]:
    if isinstance(error, ServiceError):
        return error_responses.error_body(error, names)
    return error_responses.internal_error_body(error)


@router.get("/v1/models", responses={200: {"model": responses.Models}})
async def list_models(request: Request) -> Response:
    """List the served models."""
    return _json({"object": "list", "data": [_model(one) for one in _handler(request).models()]})


@router.get("/v1/models/{name:path}", responses={200: {"model": responses.Model}})
async def get_model(name: str, request: Request) -> Response:
    """Describe a served model."""
    return _json(_model(_handler(request).model(name)))


@router.post("/tokenize", responses={200: {"model": responses.Tokens}})
async def tokenize(body: requests.TokenizeRequest, request: Request) -> Response:
    """Tokenize a prompt or a conversation."""
    handler = _handler(request)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt or messages must be set, but not both", "prompt")
    prompt = gateway_pb2.Prompt(text=body.prompt or "")
    if body.messages is not None:
        prompt.chat.CopyFrom(chat(body.messages, body.tools or []))
    ids = await handler.token_ids(body.model, prompt, open_turn=body.add_generation_prompt is not False)
    tokens: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": handler.model(body.model).context_tokens,
        "tokens": ids,
    }
    if body.return_token_strs:
        tokenizer = handler.tokenizer(body.model)
        tokens["token_strs"] = [tokenizer.bytes_of(token).decode(errors="replace") for token in ids]
    return _json(tokens)


@router.post("/detokenize", responses={200: {"model": responses.Prompt}})
async def detokenize(body: requests.DetokenizeRequest, request: Request) -> Response:
    """Decode token ids to text."""
    translated = gateway_pb2.DetokenizeRequest(model=body.model, token_ids=body.tokens, special_tokens=True)
    return _json({"prompt": await _handler(request).text(translated)})


@open_router.get("/live", responses={200: {"model": responses.State}})
async def live() -> Response:
    """Liveness: the process responds, ready or not."""
    return _json({"status": "alive"})


@open_router.get("/health", responses={200: {"model": responses.State}, 503: _ERRORS[503]})
@open_router.get("/ready", responses={200: {"model": responses.State}, 503: _ERRORS[503]})
async def ready(request: Request) -> Response:
    """Readiness: an engine is ready and the gateway is not draining."""
    if not request.app.state.readiness.ready:
        raise Unavailable("no engine is ready, or the gateway is draining")
    return _json({"status": "ready"})


@open_router.get("/version", responses={200: {"model": responses.Version}})
async def version() -> Response:
    """Return the version of the server."""
    return _json({"version": _version()})


def _handler(request: Request) -> RequestHandler:
    handler: RequestHandler = request.app.state.handler
    return handler


def _origin(request: Request) -> Origin:
    parents = request.headers.getlist("traceparent")  # ignored if sent more than once, because none is trusted
    return Origin(request.state.caller, "http", parents[0] if len(parents) == 1 else "")


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value, ensure_ascii=False), headers=headers, media_type="application/json")


def _model(described: gateway_pb2.GetModelResponse) -> dict[str, Any]:
    return {
        "id": described.model,
        "object": "model",
        "created": 0,
        "owned_by": "quire",
        "root": described.model,
        "parent": None,
        "max_model_len": described.context_tokens,
    }


def _version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # started from the sources
        return "unknown"


def _remove_validation_responses(app: FastAPI) -> None:
    """Remove FastAPI's status 422 from the OpenAPI description, because an invalid body gets 400 here."""
    original: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        description = original()
        for operations in description["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            description["components"]["schemas"].pop(name, None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
