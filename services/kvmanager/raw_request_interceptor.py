"""Requests of the KV manager as bytes, so that they are bounded before they become objects."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from quire.v1 import kvmanager_pb2 as pb
from services.runtime.interceptors import Handler, HandlerInterceptor, Metadata

# Calls whose requests are read in slices; their handlers are given bytes.
_READ_IN_SLICES = ("Attach", "LookupPrefix")
# Of all others: a name, a page.
_REQUEST_BYTES = 1 << 16


class RawRequestInterceptor(HandlerInterceptor):
    """Hands `Attach` and `LookupPrefix` their messages unread, and lets no other request be large."""

    service = pb.DESCRIPTOR.services_by_name["KVManager"].full_name

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Change how the request of a call is read."""
        del metadata
        read = None if method in _READ_IN_SLICES else _small(handler.request_deserializer)
        return handler._replace(request_deserializer=read)


def _small(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(request: bytes) -> Any:
        if len(request) > _REQUEST_BYTES:
            raise DecodeError(f"the request has {len(request)} bytes, {_REQUEST_BYTES} at most")
        return deserialize(request)

    return read
