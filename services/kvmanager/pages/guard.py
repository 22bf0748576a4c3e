"""What every answer of the block map has, and who gets none."""

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# All that the pages have comes from here, and nobody puts them into a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]


class Guard:
    """An application around another. `local`: it is asked by no other name than this machine's own.

    Else a page from elsewhere, whose name was made to lead here, could read what is shown.
    """

    def __init__(self, app: ASGIApp, *, local: bool) -> None:
        self._app = app
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        app = self._app
        if self._local and not _is_this_machine(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse("this is not what is served here", HTTPStatus.MISDIRECTED_REQUEST)
        await app(scope, receive, send_on)


def _is_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
