"""Errors in Anthropic's format, `{"type": "error", "error": {"type", "message"}, "request_id"}`, for its paths."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http import error_responses
from services.gateway.http.error_responses import ErrorHandler
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.request_ids import REQUEST_ID
from services.gateway.request_checks import new_request_id
from services.runtime import errors, statuses

OWN_REQUEST_ID = "request-id"
OVERLOADED = 529
_PATH = "/v1/messages"
_MODELS = "/v1/models"
_API_ERROR = "api_error"
_TYPES_OF_STATUSES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_FIRST_SERVER_STATUS = 500
# Those of one caller are its rate limit; all others are the load of the whole service.
_OF_CALLER = (errors.RejectionReason.TENANT_REQUESTS, errors.RejectionReason.TENANT_TOKENS)


def error_body(error: Exception, names: FieldNames, request_id: str) -> dict[str, Any]:
    """Return the JSON of an error in mid-stream. `names` are the HTTP names of the request's fields."""
    if not isinstance(error, errors.ServiceError):
        return _body(HTTPStatus.INTERNAL_SERVER_ERROR, _message(error_responses.internal_error_body(error)), request_id)
    message = names.named("", str(error))[1]
    return _body(_status_of(error, statuses.status_of(error).http), message, request_id)


def for_messages(respond: ErrorHandler) -> ErrorHandler:
    """Return an error handler that responds as `respond`, but in Anthropic's format at Anthropic's paths."""

    async def respond_in_format(request: Request, error: Exception) -> Response:
        response = await respond(request, error)
        if not is_of_messages(request.url.path) and not _is_of_models(request):
            return response
        own_id = getattr(request.state, "request_id", None)
        request_id = own_id or response.headers.get(REQUEST_ID) or new_request_id()
        status = _status_of(error, response.status_code)
        refused = json.loads(bytes(response.body))
        message = _too_long(error) or _message(refused)
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        body = json.dumps(_body(status, message, request_id, _details(refused)))
        headers = {REQUEST_ID: request_id, **headers, OWN_REQUEST_ID: request_id}
        return Response(body, status, headers, "application/json")

    return respond_in_format


def is_of_messages(path: str) -> bool:
    """Return whether a path is one of Anthropic's."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def _is_of_models(request: Request) -> bool:
    """Return whether Anthropic's client asks for models, at a path that it shares with OpenAI's."""
    path = request.url.path
    return "anthropic-version" in request.headers and (path == _MODELS or path.startswith(f"{_MODELS}/"))


def _status_of(error: Exception, usual: int) -> int:
    """Return the status of an error: 529 if the service is overloaded, 429 if the caller is at its limit."""
    is_load = isinstance(error, errors.Overloaded) and error.rejection not in _OF_CALLER
    return OVERLOADED if is_load else usual


def _too_long(error: Exception) -> str:
    """Return the message by which clients recognise a prompt that does not fit; empty for other errors."""
    if not isinstance(error, errors.ContextExceeded):
        return ""
    most = error.context_tokens - 1  # the answer has at least one token
    at_least = "" if error.is_exact else "at least "
    return f"messages: prompt is too long: {at_least}{error.prompt_tokens} tokens > {most} maximum"


def _details(openai: dict[str, Any]) -> dict[str, Any]:
    """Return the details by which Anthropic's client sends a conversation again, whole and without a thread."""
    if openai["error"]["param"] != "thread" or openai["error"]["code"] != "unsupported_value":
        return {}
    return {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def _body(
    status: int, message: str, request_id: str, details: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    default = _API_ERROR if status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    error = {"type": _TYPES_OF_STATUSES.get(status, default), "message": message, **details}
    return {"type": "error", "error": error, "request_id": request_id}


def _message(openai: dict[str, Any]) -> str:
    message: str = openai["error"]["message"]
    return message
