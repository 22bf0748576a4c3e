"""Requests that are no message of their type: gRPC would answer them with UNKNOWN and write a traceback."""

from collections.abc import Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Handler = Any  # of a call: grpc has no name for what its interceptors are given
_Context = grpc.aio.ServicerContext[Any, Any]

DETAILS = "the request cannot be read: it is no message of its type"


class _Unreadable:
    """Stands for such a request until its call is aborted."""


class UnreadableRequests(grpc.aio.ServerInterceptor):
    """Answers them with INVALID_ARGUMENT. Those on a stream raise DecodeError where the stream is read."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of a call that has one request."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _refusing_stream(handler.unary_stream),
                _reading(handler.request_deserializer),
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _refusing(handler.unary_unary), _reading(handler.request_deserializer), handler.response_serializer
        )


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(request: bytes) -> Any:
        try:
            return deserialize(request)
        except DecodeError:
            return _Unreadable()

    return read


def _refusing(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> Any:
        if isinstance(request, _Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, DETAILS)
        return await behaviour(request, context)

    return call


def _refusing_stream(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if not isasyncgenfunction(behaviour):  # it writes its responses itself
        return _refusing(behaviour)

    async def call(request: Any, context: _Context) -> Any:
        if isinstance(request, _Unreadable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, DETAILS)
        async for response in behaviour(request, context):
            yield response

    return call
