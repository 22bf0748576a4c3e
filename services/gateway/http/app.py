"""The HTTP front: its paths, and what OpenAPI says of them."""

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.v1 import gateway_pb2
from services.gateway.access.callers import ANONYMOUS, Origin
from services.gateway.http import faults
from services.gateway.http.events import EventStream
from services.gateway.http.json_request import REQUEST_ID, ApiRoute, Authenticate
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
        400: "The request is wrong; `param` names the field.",
        401: "The API key is missing, wrong or expired.",
        403: "The API key does not allow it.",
        404: "No such model.",
        408: "The request, or the reading of its answer, took too long.",
        409: "The request id is in use.",
        413: "The body is too large.",
        415: "The body is not plain JSON.",
        429: "The queue is full, or a tenant at its limit. `Retry-After` says when to come again.",
        431: "The head of the request is too large.",
        500: "The server failed.",
        503: "Draining, or no engine of the model takes requests.",
        504: "The time allowed was over; the message says whether it waited or ran.",
    }.items()
}
_ERRORS[429]["headers"] = {
    name: {"description": meaning, "required": True, "schema": {"type": "integer", "minimum": 1}}
    for name, meaning in (
        ("Retry-After", "Seconds after which there should be room again."),
        ("Retry-After-Ms", "The same in milliseconds."),
    )
}
_EVENT = {
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "A chunk of the answer as JSON, an error, or at last `[DONE]`."}
    },
    "required": ["data"],
}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}

router = APIRouter(route_class=ApiRoute, responses=_ERRORS)
open_router = APIRouter()


def make_app(
    handler: RequestHandler, readiness: Readiness, authenticate: Authenticate = lambda _: ANONYMOUS
) -> FastAPI:
    """Make the application. `authenticate` returns who sent a value of `Authorization`, or raises a ServiceError."""
    app = FastAPI(
        title="Quire",
        version=_version(),
        description="OpenAI's interface, and what vLLM's users add to it.",
        redirect_slashes=False,
    )
    app.state.handler = handler
    app.state.readiness = readiness
    app.state.authenticate = authenticate
    app.add_exception_handler(ServiceError, faults.on_domain_error)
    app.add_exception_handler(HTTPException, faults.on_http_fault)
    app.add_exception_handler(RequestValidationError, faults.on_invalid_body)
    app.add_exception_handler(Exception, faults.on_bug)
    app.include_router(router)
    app.include_router(open_router)
    _describe(app)
    return app


@router.post("/v1/completions", responses={200: {"model": responses.Completion, "content": _EVENTS}})
async def complete(body: requests.CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or several."""
    completion = CompletionCall(_handler(request), _origin(request), body, request.headers.get(REQUEST_ID))
    return await _answer(completion, request, stream=bool(body.stream))


@router.post("/v1/chat/completions", responses={200: {"model": responses.ChatCompletion, "content": _EVENTS}})
async def complete_chat(body: requests.ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    completion = ChatCompletionCall(_handler(request), _origin(request), body, request.headers.get(REQUEST_ID))
    return await _answer(completion, request, stream=bool(body.stream))


async def _answer(completion: CompletionCall | ChatCompletionCall, request: Request, *, stream: bool) -> Response:
    """Generate, as long as the client is there. A stream begins when its generation does."""
    names = request.state.names = completion.translated.names
    request.state.request_id = completion.translated.name
    headers = {REQUEST_ID: completion.translated.name}
    if not stream:
        return _json(await while_connected(request.receive, completion.whole()), headers)
    events = completion.events()
    first = await while_connected(request.receive, anext(events))
    return EventStream(first, events, lambda error: _fault(error, names), headers)


def _fault(error: Exception, names: FieldNames) -> dict[str, Any]:
    return faults.body_of(error, names) if isinstance(error, ServiceError) else faults.unexpected(error)


@router.get("/v1/models", responses={200: {"model": responses.Models}})
async def list_models(request: Request) -> Response:
    """List the models that are served now."""
    return _json({"object": "list", "data": [_model(one) for one in _handler(request).models()]})


@router.get("/v1/models/{name:path}", responses={200: {"model": responses.Model}})
async def get_model(name: str, request: Request) -> Response:
    """Describe a served model."""
    return _json(_model(_handler(request).model(name)))


@router.post("/tokenize", responses={200: {"model": responses.Tokens}})
async def tokenize(body: requests.TokenizeRequest, request: Request) -> Response:
    """Turn a prompt or a conversation into token ids."""
    handler = _handler(request)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("give prompt or messages", "prompt")
    prompt = gateway_pb2.Prompt(text=body.prompt or "")
    if body.messages is not None:
        prompt.chat.CopyFrom(chat(body.messages, body.tools or []))
    ids = await handler.token_ids(body.model, prompt, open_turn=body.add_generation_prompt is not False)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": handler.model(body.model).context_tokens,
        "tokens": ids,
    }
    if body.return_token_strs:
        tokenizer = handler.tokenizer(body.model)
        answer["token_strs"] = [tokenizer.bytes_of(token).decode(errors="replace") for token in ids]
    return _json(answer)


@router.post("/detokenize", responses={200: {"model": responses.Prompt}})
async def detokenize(body: requests.DetokenizeRequest, request: Request) -> Response:
    """Turn token ids into their text."""
    asked = gateway_pb2.DetokenizeRequest(model=body.model, token_ids=body.tokens, special_tokens=True)
    return _json({"prompt": await _handler(request).text(asked)})


@open_router.get("/live", responses={200: {"model": responses.State}})
async def live() -> Response:
    """Say that the process lives, whether it can generate or not."""
    return _json({"status": "alive"})


@open_router.get("/health", responses={200: {"model": responses.State}, 503: _ERRORS[503]})
@open_router.get("/ready", responses={200: {"model": responses.State}, 503: _ERRORS[503]})
async def ready(request: Request) -> Response:
    """Say whether it can generate now: an engine takes requests, and it does not drain."""
    if not request.app.state.readiness.ready:
        raise Unavailable("no engine takes requests, or the gateway drains")
    return _json({"status": "ready"})


@open_router.get("/version", responses={200: {"model": responses.Version}})
async def version() -> Response:
    """Tell the version."""
    return _json({"version": _version()})


def _handler(request: Request) -> RequestHandler:
    handler: RequestHandler = request.app.state.handler
    return handler


def _origin(request: Request) -> Origin:
    """Return who calls, and for which trace. Several values of a header say nothing."""
    parents = request.headers.getlist("traceparent")
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
    except metadata.PackageNotFoundError:  # it runs from its sources
        return "unknown"


def _describe(app: FastAPI) -> None:
    """Leave out of the description what FastAPI adds of its own: a body that is wrong is 400 here."""
    describe: Callable[[], dict[str, Any]] = app.openapi

    def described() -> dict[str, Any]:
        made = describe()
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        return made

    app.openapi = described  # type: ignore[method-assign]
