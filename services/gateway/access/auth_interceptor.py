"""Rejects gRPC calls without a valid API key, before their request is parsed."""

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
    """Authenticates every call of the gateway's service. Health and reflection need no key."""

    service = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Return the handler, or one that rejects the call."""
        del method
        try:
            self._authenticate(authorization_of(metadata))
        except ServiceError as error:
            return _rejecting(handler, error)
        return handler


def authorization_of(metadata: Metadata) -> str | None:
    """Return the value of `authorization` in a call's metadata; None if absent or given several times."""
    return value_of("authorization", metadata)


def value_of(key: str, metadata: Metadata) -> str | None:
    """Return the text value of a key in a call's metadata; None if absent or given several times."""
    values = [value for name, value in metadata or () if name == key]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _rejecting(handler: Handler, error: ServiceError) -> Handler:
    async def call(_request: bytes, context: _Context) -> None:
        async with abort_on_error(context):
            raise error

    async def stream(request: bytes, context: _Context) -> AsyncIterator[None]:
        await call(request, context)
        yield

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(call)
