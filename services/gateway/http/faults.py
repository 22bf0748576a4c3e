"""What goes wrong, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` and a status."""

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.openai.field_names import FieldNames
from services.runtime import errors, statuses

log = logging.getLogger("quire.gateway")

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES: dict[type[Exception], str] = {
    errors.InvalidField: "invalid_value",
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
    errors.RequestGivenUp: "request_given_up",
}
_MISSING = "missing"
_SHAPE_FAULTS = {  # by what pydantic calls them
    _MISSING: ("is missing", "missing"),
    "extra_forbidden": ("is not known to this server", "unknown_parameter"),
    "none_required": ("is not served", "unsupported_value"),
}
_SERVER_FAULT = "the server failed; its log says why"
_FIRST_SERVER_STATUS = 500


class Fault(HTTPException):
    """A request that HTTP's own rules refuse. `code` is a word for programs; `closes`: the connection goes as well."""

    def __init__(self, status: HTTPStatus, message: str, code: str, *, closes: bool = False) -> None:
        super().__init__(status, message, {"connection": "close"} if closes else None)
        self.code = code


def body_of(error: Exception, names: FieldNames) -> dict[str, Any]:
    """Return what a client is sent about a domain error; `names` are those of the fields of its request."""
    param = names.of(getattr(error, "field", "")) or None
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    return _body(statuses.status_of(error).http, names.within(str(error)), param, code)


def unexpected(error: Exception) -> dict[str, Any]:
    """Return what a client is sent about a bug, and log the rest."""
    log.error("an HTTP request failed", exc_info=error)
    return _body(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER_FAULT, None, "internal_error")


async def on_domain_error(request: Request, error: Exception) -> Response:
    """Answer a request that the gateway refused, or that failed."""
    names = getattr(request.state, "names", FieldNames())
    request_id = getattr(request.state, "request_id", None)
    headers = _headers(error) | ({"x-request-id": request_id} if request_id else {})
    return _response(statuses.status_of(error).http, body_of(error, names), headers)


async def on_http_fault(_: Request, error: Exception) -> Response:
    """Answer a request that HTTP's own rules refuse, an unknown path and a wrong method included."""
    assert isinstance(error, HTTPException)
    code = getattr(error, "code", HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return _response(error.status_code, _body(error.status_code, error.detail, None, code), error.headers or {})


async def on_invalid_body(_: Request, error: Exception) -> Response:
    """Answer a body that does not have the shape of its request: one field that is wrong is named."""
    assert isinstance(error, RequestValidationError)
    found = [(_place(one["loc"][1:], error.body, one["type"] == _MISSING), one) for one in error.errors()]
    # Where a type has several cases, each says why it is none of them: the one that went deepest was meant.
    place, worst = max((one for one in found if one[0][:1] == found[0][0][:1]), key=lambda one: len(one[0]))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".") or None
    message, code = _SHAPE_FAULTS.get(worst["type"], (f"is wrong: {worst['msg']}", "invalid_type"))
    body = _body(HTTPStatus.BAD_REQUEST, f"{param or 'the body'} {message}", param, code)
    return _response(HTTPStatus.BAD_REQUEST, body, {})


async def on_bug(_: Request, error: Exception) -> Response:
    """Answer a request that failed by a bug of the gateway's."""
    return _response(HTTPStatus.INTERNAL_SERVER_ERROR, unexpected(error), {})


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    default = "api_error" if status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    kind = _TYPES.get(HTTPStatus(status), default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _headers(error: Exception) -> dict[str, str]:
    """Say when to come again, if at all, and how to say who calls."""
    if isinstance(error, errors.RequestGivenUp):
        return {"x-should-retry": "false"}  # OpenAI's own clients repeat what ends with 500, and go by this
    return (
        {"www-authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else statuses.retry_headers(error)
    )


def _place(place: Sequence[int | str], body: Any, missing: bool) -> tuple[int | str, ...]:
    """Return where in the body a fault is. Pydantic's own place also names the cases of types that have several."""
    parts: list[int | str] = []
    for part in place:
        if (isinstance(body, Mapping) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            parts.append(part)
            body = body[part]  # type: ignore[index]
    return (*parts, *place[-1:]) if missing else tuple(parts)
