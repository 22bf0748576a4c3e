"""Refuses the gateway's calls that come without a valid API key, before anything of them is parsed."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Caller
from services.runtime.errors import ServiceError
from services.runtime.interceptors import Handler, HandlerInterceptor, Metadata
from services.runtime.statuses import abort_on_error

Authenticate = Callable[[str | None], Caller]

_Context = grpc.aio.ServicerContext[Any, Any]


class AuthInterceptor(HandlerInterceptor):
    """Asks for a key in every call of the gateway's service. Health and reflection stay open."""

    service = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Pass a call on, or give it a handler that refuses it."""
        del method
        try:
            self._authenticate(authorization_of(metadata))
        except ServiceError as error:
            return _refusing(handler, error)
        return handler


def authorization_of(metadata: Metadata) -> str | None:
    """Return the value of `authorization` in the metadata of a call; None without one, or with several."""
    return value_of("authorization", metadata)


def value_of(wanted: str, metadata: Metadata) -> str | None:
    """Return the text under a name in the metadata of a call; None without one, or with several."""
    values = [value for name, value in metadata or () if name == wanted]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _refusing(handler: Handler, error: ServiceError) -> Handler:
    async def call(_request: bytes, context: _Context) -> None:
        async with abort_on_error(context):
            raise error

    async def stream(request: bytes, context: _Context) -> AsyncIterator[None]:
        await call(request, context)
        yield

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(call)
