"""The endpoints for operators and probes."""

from importlib import metadata
from typing import Annotated, Any

from fastapi import Query, Request, Response

from quire.v1 import gateway_pb2, pins_pb2
from services.gateway.administration import ADMIN_TIMEOUT_SECONDS
from services.gateway.http.json_request import ApiRoute
from services.gateway.http.openai import responses
from services.gateway.http.routes.context import HeadRouter, administration_of, handler_of, json_response
from services.gateway.http.routes.descriptions import ERRORS
from services.runtime.errors import PermissionDenied, Unavailable, UnsupportedField

# Parameters of vLLM's endpoint that are accepted with their default.
_NEUTRAL = frozenset((("reset_running_requests", "false"), ("reset_external", "false")))

_RESET_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": responses.PrefixCacheReset},
    **{status: ERRORS[status] for status in (400, 401, 403, 404, 503, 504)},
}
_Model = Annotated[str, Query(description="Name of a served model. Default: the only served model.")]

router = HeadRouter(route_class=ApiRoute)
open_router = HeadRouter()


@open_router.get("/live", responses={200: {"model": responses.State}})
async def live() -> Response:
    """Liveness: the process responds, ready or not."""
    return json_response({"status": "alive"})


@open_router.post("/ping", responses={200: {"model": responses.State}, 503: ERRORS[503]})
@open_router.get("/ping", responses={200: {"model": responses.State}, 503: ERRORS[503]})
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


@router.get("/load", responses={200: {"model": responses.Load}, 401: ERRORS[401]})
async def load(request: Request) -> Response:
    """Return the number of requests in flight at this gateway."""
    return json_response({"server_load": handler_of(request).in_flight})


@router.get(
    "/get_load",
    responses={200: {"model": list[responses.WorkerLoad]}, **{status: ERRORS[status] for status in (401, 503)}},
)
async def engine_loads(request: Request) -> Response:
    """Return the load of each engine that accepts requests as SGLang's server does: its router asks for it."""
    names = ("num_reqs", "num_waiting_reqs", "num_tokens")
    loads = [dict(zip(names, one, strict=True)) for one in handler_of(request).loads()]
    return json_response([{"dp_rank": at, **one} for at, one in enumerate(loads)])


@router.get("/server_info", responses={200: {"model": responses.ServerInfo}, 401: ERRORS[401]})
async def server_info(request: Request) -> Response:
    """Name the only or first served model as SGLang's server does: its router asks for it."""
    name = next((one.model for one in handler_of(request).models()), "")
    return json_response({"served_model_name": name, "model_path": name, "version": server_version()})


@router.post("/reset_prefix_cache", responses=_RESET_RESPONSES)
async def reset_prefix_cache(request: Request, model: _Model = "") -> Response:
    """Forget the cached prefixes at all engines of a model. With API keys, it requires the key of an operator."""
    request.state.caller.require_operator()
    _refuse_web_page(request)
    _check_query(request)
    reset = gateway_pb2.AdminRequest(model=model, reset_prefix_cache=pins_pb2.ResetPrefixCache())
    await administration_of(request).administer(reset, ADMIN_TIMEOUT_SECONDS)
    return json_response({"status": "reset"})


def _refuse_web_page(request: Request) -> None:
    """Raise PermissionDenied for a page of another site: without a body, browsers send its request unasked."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise PermissionDenied("a web page of another site cannot reset the prefix cache")


def _check_query(request: Request) -> None:
    for name, value in request.query_params.multi_items():
        if name != "model" and (name, value.lower()) not in _NEUTRAL:
            raise UnsupportedField(f"{name[:100]} is not supported", name[:100])


def server_version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # started from the sources
        return "unknown"
