"""The static files of web pages, read once at startup: those of a service, beside those that all pages share."""

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from http import HTTPStatus
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NONE: Mapping[str, str] = MappingProxyType({})
_NO_TEXTS: Mapping[bytes, bytes] = MappingProxyType({})

Page = Callable[[Request], Awaitable[Response]]


def static_pages(
    package: str, headers: Mapping[str, str] = _NONE, replaced: Mapping[bytes, bytes] = _NO_TEXTS
) -> dict[str, Page]:
    """Return the handler of each file by its name: the files in the folder `page` of a package, and the shared ones.

    `headers` are added to each response, texts of the files `replaced`.
    """
    folders = (resources.files(package) / "page", resources.files(__package__) / "shared")
    files = {file.name: file for folder in folders for file in folder.iterdir() if file.name.endswith(tuple(_TYPES))}
    return {name: _page(name, _contents(file, replaced), headers) for name, file in files.items()}


def _contents(file: Traversable, replaced: Mapping[bytes, bytes]) -> bytes:
    contents = file.read_bytes()
    for text, value in replaced.items():
        contents = contents.replace(text, value)
    return contents


def _page(name: str, contents: bytes, more: Mapping[str, str]) -> Page:
    kind = _TYPES[name[name.rindex(".") :]]
    # Revalidated on each load, so that a page and its scripts always have the same version.
    headers = {"etag": f'"{sha256(contents).hexdigest()[:16]}"', "cache-control": "no-cache", **more}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(contents, headers=headers, media_type=kind)

    return answer
