"""Faults of requests that never reach the application, and their responses."""

import json
import re
from http import HTTPStatus
from typing import NamedTuple

import httptools

HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
# The first line of a request whose method is none of HTTP's.
_KNOWN = b"GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT|TRACE"
_METHOD = re.compile(rb"^(?!(?:%b) )([!#$%%&'*+.^_`|~0-9A-Za-z-]++) \S++ HTTP/1\.[01]\r?\n" % _KNOWN, re.MULTILINE)
_MAX_METHOD = 40


class HeadTooLarge(Exception):
    """The head of a request has too many bytes or headers."""


class Fault(NamedTuple):
    """An error in place of a response. The connection is closed within so many seconds; None: the usual time."""

    status: HTTPStatus
    message: str
    within: float | None = None

    def response(self) -> bytes:
        """Return a whole response in OpenAI's format."""
        code = self.status.phrase.lower().replace(" ", "_")
        unavailable = self.status is HTTPStatus.SERVICE_UNAVAILABLE
        kind, code = ("service_unavailable_error", "unavailable") if unavailable else ("invalid_request_error", code)
        error = {"message": self.message, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        again = "retry-after: 1\r\n" if unavailable else ""
        head = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n{again}\r\n".encode() + body


class FaultyRequest(Exception):
    """A request that cannot be parsed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def fault_of(error: Exception, data: bytes) -> Fault:
    """Return the fault that made the parser raise an error in `data`, which may begin with other requests."""
    if isinstance(error, HeadTooLarge) or isinstance(error.__context__, HeadTooLarge):
        message = f"the head of the request must have at most {HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        return Fault(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
    if isinstance(error, httptools.HttpParserInvalidMethodError) and (method := _METHOD.search(data)):
        return Fault(HTTPStatus.NOT_IMPLEMENTED, f"there is no method {method[1][:_MAX_METHOD].decode()}")
    return Fault(HTTPStatus.BAD_REQUEST, "not a valid HTTP/1.1 request")
