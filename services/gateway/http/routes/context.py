"""What an endpoint uses of its request and of the application."""

import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.access.callers import Origin
from services.gateway.administration import FleetAdministration
from services.gateway.http.request_ids import client_request_id
from services.gateway.request_handler import RequestHandler


class HeadRouter(APIRouter):
    """A router that answers HEAD wherever it answers GET. The server drops the body; OpenAPI describes GET alone."""

    def add_api_route(
        self, path: str, endpoint: Callable[..., Any], *, methods: set[str] | list[str] | None = None, **options: Any
    ) -> None:
        """Add a route."""
        super().add_api_route(path, endpoint, methods=methods, **options)
        if methods and "GET" in methods:
            super().add_api_route(path, endpoint, methods=["HEAD"], **{**options, "include_in_schema": False})


def handler_of(request: Request) -> RequestHandler:
    """Return the gateway's request handler."""
    handler: RequestHandler = request.app.state.handler
    return handler


def administration_of(request: Request) -> FleetAdministration:
    """Return the administration of the gateway's engines."""
    administration: FleetAdministration = request.app.state.administration
    return administration


def origin_of(request: Request) -> Origin:
    """Return the caller and the trace of a request."""
    parents = request.headers.getlist("traceparent")  # ignored if sent more than once, because none is trusted
    parent = parents[0] if len(parents) == 1 else ""
    return Origin(request.state.caller, "http", parent, client_request_id=client_request_id(request))


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a value as JSON with status 200."""
    return Response(json.dumps(value, ensure_ascii=False), headers=headers, media_type="application/json")
