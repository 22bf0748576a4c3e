"""Requests of the KV manager as bytes, so that they are bounded before they become objects."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quire.v1 import kvmanager_pb2 as pb
from services.runtime.unreadable import Handler

# Calls whose requests are read in slices; their handlers are given bytes.
_ATTACH, _LOOKUP = "Attach", "LookupPrefix"
# Of all others: a name, a page.
_REQUEST_BYTES = 1 << 16


class RawRequests(grpc.aio.ServerInterceptor):
    """Hands `Attach` and `LookupPrefix` their messages unread, and lets no other request be large."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Change how the request of a call is read."""
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service != pb.DESCRIPTOR.services_by_name["KVManager"].full_name:
            return handler
        if method == _ATTACH:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, None, handler.response_serializer)
        if method == _LOOKUP:
            return grpc.unary_unary_rpc_method_handler(handler.unary_unary, None, handler.response_serializer)
        reading = _small(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(handler.unary_stream, reading, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(handler.unary_unary, reading, handler.response_serializer)


def _small(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(request: bytes) -> Any:
        if len(request) > _REQUEST_BYTES:
            raise DecodeError(f"the request has {len(request)} bytes, {_REQUEST_BYTES} at most")
        return deserialize(request)

    return read
