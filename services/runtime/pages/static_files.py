"""The static files of the pages, read once at startup."""

from collections.abc import Awaitable, Callable
from hashlib import sha256
from http import HTTPStatus
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from services.runtime.ports import KVMANAGER

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = {"index.html": "/", "sandbox.html": "/sandbox"}

Page = Callable[[Request], Awaitable[Response]]


def static_routes() -> dict[str, Page]:
    """Return the handler of each path."""
    folder = resources.files(__package__) / "page"
    files = [file for file in folder.iterdir() if file.name.endswith(tuple(_TYPES))]
    return {_NAMES.get(file.name, f"/{file.name}"): _page(file.name, _contents(file)) for file in files}


def _contents(file: Traversable) -> bytes:
    return file.read_bytes().replace(b"%KVMANAGER_PORT%", b"%d" % KVMANAGER.grpc)


def _page(name: str, contents: bytes) -> Page:
    kind = _TYPES[name[name.rindex(".") :]]
    # Revalidated on each load, so that a page and its scripts always have the same version.
    headers = {"etag": f'"{sha256(contents).hexdigest()[:16]}"', "cache-control": "no-cache"}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(contents, headers=headers, media_type=kind)

    return answer
