"""Error responses in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` and a status."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from services.gateway.access.namespace import qualified
from services.gateway.http.not_served import reason_of
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.request_ids import REQUEST_ID, client_request_id, id_headers
from services.gateway.request_checks import new_request_id
from services.runtime import errors, statuses
from services.runtime.http.validation import violation

log = logging.getLogger("quire.gateway")
requests_log = logging.getLogger("quire.gateway.requests")
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES: dict[type[Exception], str] = {
    errors.InvalidField: "invalid_value",
    errors.ContextExceeded: "context_length_exceeded",
    errors.UnsupportedField: "unsupported_value",
    errors.Unauthenticated: "invalid_api_key",
    errors.PermissionDenied: "not_permitted",
    errors.UnknownModel: "model_not_found",
    errors.RequestExists: "request_is_live",
    errors.Overloaded: "overloaded",
    errors.SlowClient: "slow_client",
    errors.Unavailable: "unavailable",
    errors.DeadlineExceeded: "deadline_passed",
    errors.GenerationFailed: "generation_failed",
    errors.RepeatedEngineLoss: "request_given_up",
}
_MAX_PATH = 100
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_INTERNAL_ERROR = "internal server error; see the log of the gateway"
_FIRST_SERVER_STATUS = 500


class HttpError(HTTPException):
    """A request rejected by the rules of HTTP. `code` is the error code; `closes` also closes the connection."""

    def __init__(self, status: HTTPStatus, message: str, code: str, *, closes: bool = False) -> None:
        super().__init__(status, message, {"connection": "close"} if closes else None)
        self.code = code


def error_body(error: Exception, names: FieldNames) -> dict[str, Any]:
    """Return the response body for a ServiceError. `names` are the HTTP names of the request's fields."""
    param, message = names.named(getattr(error, "field", ""), str(error))
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    if isinstance(error, errors.ContextExceeded):  # LangChain looks for the code in the message
        message = f"{message} ({code})"
    return _body(statuses.status_of(error).http, message, param or None, code)


def internal_error_body(error: Exception) -> dict[str, Any]:
    """Log an unexpected error, and return a response body without its details."""
    log.error("an HTTP request failed", exc_info=error)
    return _body(HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL_ERROR, None, "internal_error")


def logged(respond: ErrorHandler) -> ErrorHandler:
    """Return an error handler that responds as `respond` in OpenAI's format, and logs the refusals of known callers.

    A request that is refused before it reaches the queue has no other line.
    """

    async def respond_and_log(request: Request, error: Exception) -> Response:
        response = await respond(request, error)
        if hasattr(request.state, "caller") and response.status_code < _FIRST_SERVER_STATUS:
            requests_log.info("request refused", extra=_refusal(request, response))
        return response

    return respond_and_log


def _refusal(request: Request, response: Response) -> dict[str, Any]:
    client_id, tenant = client_request_id(request), request.state.caller.tenant
    own_id = getattr(request.state, "request_id", None) or ("" if client_id else response.headers[REQUEST_ID])
    body = json.loads(bytes(response.body))["error"]
    fields = {
        "request_id": qualified(tenant, own_id) if own_id else "",
        "tenant": tenant,
        "client_request_id": client_id,
    }
    path = request.scope["route"].path
    return {name: value for name, value in fields.items() if value} | {
        "protocol": "http",
        "path": path,
        "status_code": response.status_code,
        "code": body["code"],
        "field": body["param"] or "",
    }


async def on_service_error(request: Request, error: Exception) -> Response:
    """Respond to a request that the gateway rejected or that failed."""
    names = getattr(request.state, "field_names", FieldNames())
    headers = {**_headers(error), **_request_id(request)}
    return _response(statuses.status_of(error).http, error_body(error, names), headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Respond to a request rejected by the rules of HTTP, such as an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    code = getattr(error, "code", HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    place = f"{request.method} {request.url.path[:_MAX_PATH]}"
    of_paths = {404: f"there is no {place}", 405: f"{place} is not allowed"}
    message = error.detail if isinstance(error, HttpError) else of_paths.get(error.status_code, error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND and (reason := reason_of(request.url.path)):
        code, message = "not_served", f"{place} is not served: {reason}"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()} | _request_id(request)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # the router names only the methods of the first route
        headers["allow"] = ", ".join(_methods_of(request))
    return _response(error.status_code, _body(error.status_code, message, None, code), headers)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Respond to a body that does not match the schema. The response names one invalid field."""
    assert isinstance(error, RequestValidationError)
    path, message, code = violation([{**one, "loc": one["loc"][1:]} for one in error.errors()], error.body)
    body = _body(HTTPStatus.BAD_REQUEST, message, path or None, code)
    return _response(HTTPStatus.BAD_REQUEST, body, _request_id(request))


async def on_unexpected_error(_: Request, error: Exception) -> Response:
    """Respond to a request that failed with an unexpected exception."""
    return _response(HTTPStatus.INTERNAL_SERVER_ERROR, internal_error_body(error), {})


def _methods_of(request: Request) -> list[str]:
    """Return the methods of a path."""
    scopes = ({**request.scope, "method": method} for method in _METHODS)
    routes = request.app.routes
    return [scope["method"] for scope in scopes if any(one.matches(scope)[0] is Match.FULL for one in routes)]


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    default = "api_error" if status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    kind = _TYPES.get(HTTPStatus(status), default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _request_id(request: Request) -> dict[str, str]:
    return id_headers(request, getattr(request.state, "request_id", None) or new_request_id())


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, errors.RepeatedEngineLoss):
        return {"x-should-retry": "false"}  # OpenAI's clients retry status 500 unless this header is set
    return (
        {"www-authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else statuses.retry_headers(error)
    )
