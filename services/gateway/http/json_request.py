"""Authenticates a request, then reads its body as JSON within the size limit."""

import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from services.gateway.access.callers import Caller
from services.gateway.http.error_responses import HttpError
from services.runtime.errors import Unauthenticated
from services.runtime.http.disconnect import ClientDisconnected
from services.runtime.http.json_body import MalformedJson, parse
from services.runtime.transport import CLIENT_MESSAGE_BYTES

Authenticate = Callable[[str | None], Caller]

_CHARSET = re.compile(r"charset\s*=\s*\"?([^\s\";]*)")
_KEY = "x-api-key"
_BEARER = re.compile(r"bearer\s+\S", re.IGNORECASE)
_CLIENT_CLOSED_REQUEST = 499  # never sent; counted in the metrics


class JsonRequest(Request):
    """A request with a size limit for its body, and strict JSON."""

    async def body(self) -> bytes:
        """Read the body, at most up to the size limit. Raises HttpError."""
        if not hasattr(self, "_body"):
            _check_headers(self)
            parts, size = [], 0
            async for part in self.stream():
                size += len(part)
                if size > CLIENT_MESSAGE_BYTES:
                    raise _too_large()
                parts.append(part)
            self._body = b"".join(parts)
        return self._body

    async def json(self) -> Any:
        """Parse the body. Raises HttpError."""
        try:
            return parse(await self.body())
        except MalformedJson as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error), "invalid_json") from error


class ApiRoute(APIRoute):
    """An authenticated route with a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def authenticate_and_handle(request: Request) -> Response:
            request.state.caller = _caller(request)
            try:
                return await handle(JsonRequest(request.scope, request.receive))
            except ClientDisconnected:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)

        return authenticate_and_handle


def _caller(request: Request) -> Caller:
    """Return the owner of the key of a request, in OpenAI's header or in Anthropic's. Raises Unauthenticated.

    Clients and proxies add an empty header, or an `authorization` of another scheme, beside the one that has the key.
    """
    authenticate: Authenticate = request.app.state.authenticate
    given = [value for value in request.headers.getlist(_KEY) if value.strip()]
    if not given:
        return authenticate(_authorization(request))
    # Several values count as none, as those of `authorization`.
    caller = authenticate(f"Bearer {given[0]}" if len(given) == 1 else None)
    others = [value for value in request.headers.getlist("authorization") if _BEARER.match(value)]
    if others and authenticate(others[0] if len(others) == 1 else None) != caller:
        raise Unauthenticated(f"authorization and {_KEY} have keys of different callers")
    return caller


def _authorization(request: Request) -> str | None:
    # Several values count as none, because a proxy in front may have checked another one.
    values = request.headers.getlist("authorization")
    return values[0] if len(values) == 1 else None


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"content-encoding must be identity, not {encoding[:100]}"
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "encoded_body")
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json":
        given = f", not {kind.strip()[:100]}" if kind.strip() else "; the header is missing or empty"
        message = f"content-type must be application/json{given}"
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
    if (charset := _CHARSET.search(parameters)) and charset[1] not in ("utf-8", "utf8"):
        message = f"the charset of content-type must be utf-8, not {charset[1][:100]}"
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > CLIENT_MESSAGE_BYTES:
        raise _too_large(f", not {length[:20]}")


def _too_large(given: str = "") -> HttpError:
    message = f"the body must have at most {CLIENT_MESSAGE_BYTES} bytes{given}"
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "body_too_large")
