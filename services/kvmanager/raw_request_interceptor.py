"""Passes requests to the KV manager as bytes, so that they are bounded before they are parsed."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from quire.v1 import kvmanager_pb2 as pb
from services.runtime.interceptors import Handler, HandlerInterceptor, Metadata

# Methods that parse their requests in slices; their handlers receive bytes.
_READ_IN_SLICES = ("Attach", "LookupPrefix")
# Maximum size of all other requests, which contain a name or a page.
_MAX_REQUEST_BYTES = 1 << 16


class RawRequestInterceptor(HandlerInterceptor):
    """Passes the requests of `Attach` and `LookupPrefix` unparsed, and rejects other large requests."""

    service = pb.DESCRIPTOR.services_by_name["KVManager"].full_name

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Replace the request deserializer of a method."""
        del metadata
        read = None if method in _READ_IN_SLICES else _bounded(handler.request_deserializer)
        return handler._replace(request_deserializer=read)


def _bounded(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(request: bytes) -> Any:
        if len(request) > _MAX_REQUEST_BYTES:
            raise DecodeError(f"the request must have at most {_MAX_REQUEST_BYTES} bytes, not {len(request)}")
        return deserialize(request)

    return read
