"""The header X-Request-Id: a client's own name for a request, which the response repeats.

It need not be unique: inside, every request has an id of the gateway's, and the log has both.
"""

import re

from starlette.requests import Request

REQUEST_ID = "x-request-id"
# Of characters that are safe in headers and logs.
_USABLE = re.compile(r"[!-~]{1,256}")


def client_request_id(request: Request) -> str:
    """Return the client's name for a request; empty without one that is usable."""
    given = request.headers.getlist(REQUEST_ID)
    return given[0] if len(given) == 1 and _USABLE.fullmatch(given[0]) else ""


def id_headers(request: Request, own_id: str) -> dict[str, str]:
    """Return the header of a response: the client's name for the request, else the gateway's id."""
    return {REQUEST_ID: client_request_id(request) or own_id}
