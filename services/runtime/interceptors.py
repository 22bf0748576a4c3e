"""gRPC interceptors: a base that wraps handlers, and one that refuses malformed requests."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from inspect import isasyncgenfunction
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from services.runtime.errors import FIELD_METADATA, InvalidField

Handler = Any  # a named tuple for which grpc has no type
Metadata = Iterable[tuple[str, str | bytes]] | None
_Context = grpc.aio.ServicerContext[Any, Any]

MALFORMED = "malformed request: not a valid message"


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all calls of `service`, or of all services if it is empty."""

    service = ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the handler of a call."""
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or self.service not in ("", service):
            return handler
        return self.wrap_handler(handler, method, handler_call_details.invocation_metadata)

    @abstractmethod
    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Return the handler to use instead of `handler` for a call with this metadata."""


class _Malformed(NamedTuple):
    """Placeholder of a malformed request until its call is aborted."""

    error: InvalidField


class MalformedRequests(HandlerInterceptor):
    """Answers malformed requests with INVALID_ARGUMENT; gRPC would answer UNKNOWN and log a traceback.

    A deserializer raises DecodeError, or InvalidField to name the field. For streams of requests, the error is raised
    where the stream is read.
    """

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Wrap the handler of a call with a single request."""
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
    if not isasyncgenfunction(behaviour):  # it writes its responses to the context
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
