"""The block map's routes: pages, and the JSON API of their scripts."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager import KVManager, KVManagerError
from services.kvmanager.pages import details
from services.kvmanager.pages.live import LiveMaps, pool_json
from services.kvmanager.pages.playground import operations
from services.kvmanager.pages.playground.sandbox import Sandbox
from services.kvmanager.pages.playground.sandbox_view import sandbox_json
from services.kvmanager.pages.playground.sandboxes import Sandboxes, UnknownSandbox
from services.runtime.errors import InvalidField, ServiceError
from services.runtime.http.server_sent_events import ServerSentEvents
from services.runtime.http.validation import violation
from services.runtime.pages.guard import Guard
from services.runtime.pages.static_files import Page, static_pages
from services.runtime.ports import KVMANAGER
from services.runtime.slices import run_in_slices
from services.runtime.statuses import retry_headers, status_of

_MAX_BODY_BYTES = 16 * 1024
_MAX_BODY_SECONDS = 10.0
_PATHS = {"index.html": "/", "sandbox.html": "/sandbox"}

log = logging.getLogger("quire.kvmanager")

T = TypeVar("T")


class BlockMapApp:
    """The application of one KV manager. If `local`, only requests to this machine's own names are served."""

    def __init__(self, manager: KVManager, clock: Callable[[], float], *, local: bool) -> None:
        self._manager = manager
        self._live = LiveMaps(manager)
        self._sandboxes = Sandboxes(clock)
        routes = [
            *(Route(_PATHS.get(name, f"/{name}"), page) for name, page in _static_pages().items()),
            Route("/api/pools", self.list_pools),
            Route("/api/pools/{engine:path}/live", self.watch),
            Route("/api/pools/{engine:path}/sequences", self.list_sequences),
            Route("/api/pools/{engine:path}/sequences/{sequence:int}", self.get_sequence),
            Route("/api/pools/{engine:path}/blocks/{block:int}", self.get_block),
            Route("/api/sandbox", self.create_sandbox, methods=["POST"]),
            Route("/api/sandbox/{name}", self.get_sandbox),
            Route("/api/sandbox/{name}/operations", self.operate, methods=["POST"]),
            Route("/api/sandbox/{name}/undo", self.undo, methods=["POST"]),
            Route("/api/sandbox/{name}/reset", self.reset, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            **dict.fromkeys((ServiceError, KVManagerError), _on_error),
            UnknownSandbox: _on_unknown_sandbox,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        }
        self.asgi = Guard(Starlette(routes=routes, exception_handlers=handlers), local=local)

    # Pools

    async def list_pools(self, _request: Request) -> Response:
        """List the pools."""
        return _json({"pools": [pool_json(session) for session in self._manager.sessions()]})

    async def watch(self, request: Request) -> Response:
        """Stream a pool's map, then its changes."""
        messages = self._live.watch(request.path_params["engine"])
        return ServerSentEvents(await anext(messages), messages, {"cache-control": "no-store"})

    async def list_sequences(self, request: Request) -> Response:
        """List the latest sequences of a pool."""
        session = self._manager.session(request.path_params["engine"])
        return _json({"sequences": details.sequences_json(session)})

    async def get_sequence(self, request: Request) -> Response:
        """Describe a sequence."""
        session = self._manager.session(request.path_params["engine"])
        return _json(await details.sequence_json(self._manager, session, request.path_params["sequence"]))

    async def get_block(self, request: Request) -> Response:
        """Describe a block of the device tier, or with `?tier=host` of the host tier; `?kind=` names a window kind."""
        session = self._manager.session(request.path_params["engine"])
        tier = request.query_params.get("tier", "device")
        if tier not in ("device", "host"):
            raise InvalidField(f"tier must be device or host, not {tier[:20]!r}", "tier")
        block = request.path_params["block"]
        kind = request.query_params.get("kind", "")
        return _json(await details.block_json(self._manager, session, block, host=tier == "host", kind=kind))

    # Sandboxes

    async def create_sandbox(self, request: Request) -> Response:
        """Create a sandbox."""
        new = await _body(request, operations.NEW_SANDBOX)
        return self._sandbox(self._sandboxes.create(new.block_size))

    async def get_sandbox(self, request: Request) -> Response:
        """Describe a sandbox."""
        return self._sandbox(request.path_params["name"])

    async def operate(self, request: Request) -> Response:
        """Run an operation in a sandbox."""
        operation = await _body(request, operations.OPERATION)
        self._sandboxes.get(request.path_params["name"]).operate(operation)
        return self._sandbox(request.path_params["name"])

    async def undo(self, request: Request) -> Response:
        """Undo a sandbox's last operation."""
        name = request.path_params["name"]
        self._sandboxes.replace(name, await run_in_slices(self._sandboxes.get(name).undone()))
        return self._sandbox(name)

    async def reset(self, request: Request) -> Response:
        """Reset a sandbox to an empty pool."""
        name = request.path_params["name"]
        self._sandboxes.replace(name, Sandbox(self._sandboxes.get(name).pool.block_size))
        return self._sandbox(name)

    def _sandbox(self, name: str) -> Response:
        return _json({"name": name} | sandbox_json(self._sandboxes.get(name)))


def _static_pages() -> dict[str, Page]:
    return static_pages(__package__, replaced={b"%KVMANAGER_PORT%": b"%d" % KVMANAGER.grpc})


async def _body(request: Request, adapter: TypeAdapter[T]) -> T:
    """Read a small JSON body. Raises HTTPException, or InvalidField with the name of the invalid field."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    body = b""
    async with asyncio.timeout(_MAX_BODY_SECONDS):
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must have at most {_MAX_BODY_BYTES} bytes"
                )
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        if errors[0]["type"] == "json_invalid":
            raise InvalidField("the body must be JSON", "") from error
        path, message, _ = violation(errors, from_json(body))
        raise InvalidField(message, path) from error


def _json(value: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    body = json.dumps(value, separators=(",", ":"))
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def _error(status: int, text: str, field: str = "", headers: Mapping[str, str] | None = None) -> Response:
    response = _json({"error": {"message": text, "field": field}}, status)
    response.headers.update(headers or {})
    return response


async def _on_error(_request: Request, error: Exception) -> Response:
    return _error(status_of(error).http, str(error), getattr(error, "field", ""), retry_headers(error))


async def _on_unknown_sandbox(_request: Request, error: Exception) -> Response:
    return _error(HTTPStatus.NOT_FOUND, str(error))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _on_bug(_request: Request, error: Exception) -> Response:
    log.error("block map request failed", exc_info=error)
    return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error, see the log")
