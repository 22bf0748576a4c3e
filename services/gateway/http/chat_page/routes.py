"""The routes of the chat page: its files for anybody, and what it reads for the owner of an API key.

They are the page's own, so they are not in the OpenAPI description, and may change with any version.
"""

import re
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from services.gateway.http.chat_page.block_watch import BlockWatches
from services.gateway.http.error_responses import HttpError
from services.gateway.http.json_request import ApiRoute
from services.gateway.http.openai.translation import CHAT_ID_PREFIX
from services.gateway.http.routes.context import HeadRouter, handler_of, json_response
from services.runtime.errors import InvalidField, PermissionDenied
from services.runtime.http.disconnect import while_connected
from services.runtime.http.server_sent_events import ServerSentEvents
from services.runtime.pages.guard import HEADERS, is_this_machine
from services.runtime.pages.static_files import static_pages

PATH = "/chat/"
_INDEX = "chat.html"
# 128 random bits, which the page draws and the gateway draws where a client names none: an id that nobody guesses.
_UNGUESSABLE = re.compile(r"[0-9a-f]{32}")
_PRIVATE = {**HEADERS, "cache-control": "no-store"}


def chat_routers(watches: BlockWatches, *, local: bool) -> list[APIRouter]:
    """Return the routes. If `local`, only requests to this machine's own names are served."""
    host = [Depends(_require_this_machine)] if local else []
    return [_files(host), _readings(watches, host)]


def _files(host: list[Any]) -> APIRouter:
    router = HeadRouter(dependencies=host, include_in_schema=False)
    for name, page in static_pages(__package__, HEADERS).items():
        path = PATH if name == _INDEX else f"{PATH}{name}"
        router.add_api_route(path, page, methods=["GET"], response_model=None)
    router.add_api_route(PATH.rstrip("/"), _to_page, methods=["GET"], response_model=None)
    return router


def _readings(watches: BlockWatches, host: list[Any]) -> APIRouter:
    own_pages = [*host, Depends(_refuse_other_pages)]
    router = APIRouter(route_class=ApiRoute, dependencies=own_pages, include_in_schema=False)

    @router.get("/chat/models")
    async def models(request: Request) -> Response:
        """Describe the served models, as far as the page draws them."""
        names = ("model", "context_tokens", "block_size", "device_blocks")
        found = [{name: getattr(one, name) for name in names} for one in handler_of(request).models()]
        return json_response({"models": found}, _PRIVATE)

    @router.get("/chat/blocks/{request_id}")
    async def blocks(request: Request, request_id: str) -> Response:
        """Stream what one request holds."""
        if not _UNGUESSABLE.fullmatch(request_id):
            raise InvalidField("request_id must have 32 hexadecimal digits, as the page's own have", "request_id")
        events = watches.watch(request.state.caller, f"{CHAT_ID_PREFIX}{request_id}")
        return ServerSentEvents(await while_connected(request.receive, anext(events)), events, _PRIVATE)

    return router


async def _to_page(_request: Request) -> Response:
    return RedirectResponse("chat/", HTTPStatus.TEMPORARY_REDIRECT)  # relative, for proxies that add a prefix


async def _require_this_machine(request: Request) -> None:
    """Raise HttpError for a foreign name of this machine: a foreign page could read by DNS rebinding."""
    if not is_this_machine(request.headers.get("host", "")):
        message = "the chat page is served under this machine's own names only"
        raise HttpError(HTTPStatus.MISDIRECTED_REQUEST, message, "unknown_host")


async def _refuse_other_pages(request: Request) -> None:
    """Raise PermissionDenied for the page of another site, also of one that may call the API."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise PermissionDenied("a web page of another site cannot read the blocks of requests")
