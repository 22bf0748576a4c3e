"""How a request is taken in: who calls is asked first, then its body is read, as far as it may go."""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from services.gateway.access.callers import Caller
from services.gateway.http.faults import Fault
from services.gateway.http.json_body import MalformedJson, parse
from services.gateway.http.openai.translation import own_id
from services.runtime.errors import ServiceError
from services.runtime.http.disconnect import ClientDisconnected
from services.runtime.transport import CLIENT_MESSAGE_BYTES

REQUEST_ID = "x-request-id"
Authenticate = Callable[[str | None], Caller]

_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the metrics


class JsonRequest(Request):
    """A request whose body is bounded, and JSON that means one thing alone."""

    async def body(self) -> bytes:
        """Read the body. Raises Fault; what is too large is not read to its end."""
        if not hasattr(self, "_body"):
            _check_head(self)
            parts, size = [], 0
            async for part in self.stream():
                size += len(part)
                if size > CLIENT_MESSAGE_BYTES:
                    raise _too_large()
                parts.append(part)
            self._body = b"".join(parts)
        return self._body

    async def json(self) -> Any:
        """Parse the body. Raises Fault."""
        try:
            return parse(await self.body())
        except MalformedJson as error:
            raise Fault(HTTPStatus.BAD_REQUEST, str(error), "invalid_json") from error


class ApiRoute(APIRoute):
    """A route for those who may call, with a body of JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's own handler."""
        handle = super().get_route_handler()

        async def taken_in(request: Request) -> Response:
            authenticate: Authenticate = request.app.state.authenticate
            try:
                request.state.caller = authenticate(_authorization(request))
            except ServiceError:
                request.state.request_id = own_id(request.headers.get(REQUEST_ID))
                raise
            try:
                return await handle(JsonRequest(request.scope, request.receive))
            except ClientDisconnected:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)

        return taken_in


def _authorization(request: Request) -> str | None:
    """Return the value of `Authorization`. Several say nothing: what is before us may have gone by another one."""
    values = request.headers.getlist("authorization")
    return values[0] if len(values) == 1 else None


def _check_head(request: Request) -> None:
    """Refuse a body for what its head says."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Fault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a body is taken as it is, without encoding", "encoded_body")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Fault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a body is application/json", "unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > CLIENT_MESSAGE_BYTES:
        raise _too_large()


def _too_large() -> Fault:
    message = f"a body has at most {CLIENT_MESSAGE_BYTES} bytes"
    return Fault(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "body_too_large")
