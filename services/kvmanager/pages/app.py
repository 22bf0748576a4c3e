"""The paths of the block map's server: pages, what they ask, and what every answer has."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager import KVManager, KVManagerError
from services.kvmanager.pages import details
from services.kvmanager.pages.guard import Guard
from services.kvmanager.pages.live import LiveMaps, pool_json
from services.kvmanager.pages.playground import operations
from services.kvmanager.pages.playground.sandbox import Sandbox
from services.kvmanager.pages.playground.sandbox_view import sandbox_json
from services.kvmanager.pages.playground.sandboxes import Sandboxes, UnknownSandbox
from services.kvmanager.pages.static_files import static_routes
from services.kvmanager.slices import run_in_slices
from services.runtime.errors import InvalidField, ServiceError
from services.runtime.http.server_sent_events import ServerSentEvents
from services.runtime.statuses import retry_headers, status_of

_MOST_BODY_BYTES = 16 * 1024
_MOST_BODY_SECONDS = 10.0

log = logging.getLogger("quire.kvmanager")

T = TypeVar("T")


class BlockMapApp:
    """Answers for one KV manager. `local`: nobody but this machine is to reach it."""

    def __init__(self, manager: KVManager, clock: Callable[[], float], *, local: bool) -> None:
        self._manager = manager
        self._live = LiveMaps(manager)
        self._sandboxes = Sandboxes(clock)
        routes = [
            *(Route(path, page) for path, page in static_routes().items()),
            Route("/api/pools", self.list_pools),
            Route("/api/pools/{engine:path}/live", self.watch),
            Route("/api/pools/{engine:path}/sequences", self.list_sequences),
            Route("/api/pools/{engine:path}/sequences/{sequence:int}", self.get_sequence),
            Route("/api/pools/{engine:path}/blocks/{block:int}", self.get_block),
            Route("/api/sandbox", self.begin_sandbox, methods=["POST"]),
            Route("/api/sandbox/{name}", self.get_sandbox),
            Route("/api/sandbox/{name}/operations", self.operate, methods=["POST"]),
            Route("/api/sandbox/{name}/undo", self.undo, methods=["POST"]),
            Route("/api/sandbox/{name}/reset", self.reset, methods=["POST"]),
        ]
        faults: dict[Any, Any] = {
            **dict.fromkeys((ServiceError, KVManagerError), _on_refusal),
            UnknownSandbox: _on_missing,
            HTTPException: _on_fault,
            Exception: _on_bug,
        }
        self.asgi = Guard(Starlette(routes=routes, exception_handlers=faults), local=local)

    # Pools

    async def list_pools(self, _request: Request) -> Response:
        """List the pools that there are."""
        return _json({"pools": [pool_json(session) for session in self._manager.sessions()]})

    async def watch(self, request: Request) -> Response:
        """Stream a pool's map: all of it, then what changes."""
        messages = self._live.watch(request.path_params["engine"])
        return ServerSentEvents(await anext(messages), messages, {"cache-control": "no-store"})

    async def list_sequences(self, request: Request) -> Response:
        """List a pool's latest sequences."""
        session = self._manager.session(request.path_params["engine"])
        return _json({"sequences": details.sequences_json(session)})

    async def get_sequence(self, request: Request) -> Response:
        """Describe a sequence."""
        session = self._manager.session(request.path_params["engine"])
        return _json(await details.sequence_json(self._manager, session, request.path_params["sequence"]))

    async def get_block(self, request: Request) -> Response:
        """Describe a block, of the host tier with `?tier=host`."""
        session = self._manager.session(request.path_params["engine"])
        tier = request.query_params.get("tier", "device")
        if tier not in ("device", "host"):
            raise InvalidField(f"tier is {tier[:20]!r}, it must be device or host", "tier")
        block = request.path_params["block"]
        return _json(await details.block_json(self._manager, session, block, host=tier == "host"))

    # Sandboxes

    async def begin_sandbox(self, request: Request) -> Response:
        """Make a sandbox."""
        beginning = await _body(request, operations.NEW_SANDBOX)
        return self._sandbox(self._sandboxes.begin(beginning.block_size))

    async def get_sandbox(self, request: Request) -> Response:
        """Show a sandbox."""
        return self._sandbox(request.path_params["name"])

    async def operate(self, request: Request) -> Response:
        """Do an operation in a sandbox."""
        operation = await _body(request, operations.OPERATION)
        self._sandboxes.get(request.path_params["name"]).operate(operation)
        return self._sandbox(request.path_params["name"])

    async def undo(self, request: Request) -> Response:
        """Take back a sandbox's last operation."""
        name = request.path_params["name"]
        self._sandboxes.replace(name, await run_in_slices(self._sandboxes.get(name).undone()))
        return self._sandbox(name)

    async def reset(self, request: Request) -> Response:
        """Begin a sandbox anew."""
        name = request.path_params["name"]
        self._sandboxes.replace(name, Sandbox(self._sandboxes.get(name).pool.block_size))
        return self._sandbox(name)

    def _sandbox(self, name: str) -> Response:
        return _json({"name": name} | sandbox_json(self._sandboxes.get(name)))


async def _body(request: Request, adapter: TypeAdapter[T]) -> T:
    """Read a small body of JSON. Raises HTTPException, or InvalidField naming what is wrong with it."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    body = b""
    async with asyncio.timeout(_MOST_BODY_SECONDS):
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY_BYTES:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidField(f"{field or 'body'}: {first['msg']}", field) from error


def _json(value: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    body = json.dumps(value, separators=(",", ":"))
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def _refusal(status: int, text: str, field: str = "", headers: Mapping[str, str] | None = None) -> Response:
    response = _json({"error": {"message": text, "field": field}}, status)
    response.headers.update(headers or {})
    return response


async def _on_refusal(_request: Request, error: Exception) -> Response:
    return _refusal(status_of(error).http, str(error), getattr(error, "field", ""), retry_headers(error))


async def _on_missing(_request: Request, error: Exception) -> Response:
    return _refusal(HTTPStatus.NOT_FOUND, str(error))


async def _on_fault(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail)


async def _on_bug(_request: Request, error: Exception) -> Response:
    log.error("the block map failed", exc_info=error)
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; its log says why")
