"""The endpoints for operators and probes."""

from importlib import metadata

from fastapi import APIRouter, Request, Response

from services.gateway.http.openai import responses
from services.gateway.http.routes.context import json_response
from services.gateway.http.routes.descriptions import ERRORS
from services.runtime.errors import Unavailable

open_router = APIRouter()


@open_router.get("/live", responses={200: {"model": responses.State}})
async def live() -> Response:
    """Liveness: the process responds, ready or not."""
    return json_response({"status": "alive"})


@open_router.get("/health", responses={200: {"model": responses.State}, 503: ERRORS[503]})
@open_router.get("/ready", responses={200: {"model": responses.State}, 503: ERRORS[503]})
async def ready(request: Request) -> Response:
    """Readiness: an engine is ready and the gateway is not draining."""
    if not request.app.state.readiness.ready:
        raise Unavailable("no engine is ready, or the gateway is draining")
    return json_response({"status": "ready"})


@open_router.get("/version", responses={200: {"model": responses.Version}})
async def version() -> Response:
    """Return the version of the server."""
    return json_response({"version": server_version()})


def server_version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # started from the sources
        return "unknown"
