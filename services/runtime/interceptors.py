"""Interceptors of gRPC calls: the base of those that replace handlers, and the one that refuses malformed requests."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from inspect import isasyncgenfunction
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from services.runtime.errors import FIELD_METADATA, InvalidField

Handler = Any  # of a call, a named tuple: grpc has no name for what its interceptors are given
Metadata = Iterable[tuple[str, str | bytes]] | None
_Context = grpc.aio.ServicerContext[Any, Any]

MALFORMED = "the request cannot be read: it is no message of its type"


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Replaces the handlers of the calls of `service`, or of all calls where that is empty."""

    service = ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the handler for one call."""
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or self.service not in ("", service):
            return handler
        return self.wrap_handler(handler, method, handler_call_details.invocation_metadata)

    @abstractmethod
    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Return what handles a call with this metadata instead of `handler`."""


class _Malformed(NamedTuple):
    """Takes the place of a malformed request until its call is aborted with the error."""

    error: InvalidField


class MalformedRequests(HandlerInterceptor):
    """Answers malformed requests with INVALID_ARGUMENT; gRPC would answer UNKNOWN and write a traceback.

    A deserializer raises DecodeError, or InvalidField to name the field. On a stream of requests, what it raises comes
    out where the stream is read.
    """

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Wrap the handler of a call that has one request."""
        del method, metadata
        if handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = _reading(handler.request_deserializer)
        if handler.response_streaming:
            return handler._replace(request_deserializer=read, unary_stream=_refusing_stream(handler.unary_stream))
        return handler._replace(request_deserializer=read, unary_unary=_refusing(handler.unary_unary))


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(request: bytes) -> Any:
        try:
            return deserialize(request)
        except DecodeError:
            return _Malformed(InvalidField(MALFORMED))
        except InvalidField as error:
            return _Malformed(error)

    return read


def _refusing(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> Any:
        await _check(request, context)
        return await behaviour(request, context)

    return call


def _refusing_stream(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if not isasyncgenfunction(behaviour):  # it writes its responses itself
        return _refusing(behaviour)

    async def call(request: Any, context: _Context) -> Any:
        await _check(request, context)
        async for response in behaviour(request, context):
            yield response

    return call


async def _check(request: object, context: _Context) -> None:
    if isinstance(request, _Malformed):
        field = request.error.field
        metadata = ((FIELD_METADATA, field),) if field else ()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request.error), metadata)
