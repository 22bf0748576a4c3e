"""The HTTP application: its endpoints, its error responses, and its OpenAPI description."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from services.gateway.access.callers import ANONYMOUS
from services.gateway.administration import FleetAdministration
from services.gateway.http import error_responses
from services.gateway.http.anthropic.error_format import for_messages
from services.gateway.http.error_responses import logged
from services.gateway.http.json_request import Authenticate
from services.gateway.http.routes import generation, messages, models, operations
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import ServiceError
from services.runtime.service import Readiness


def make_app(
    handler: RequestHandler,
    administration: FleetAdministration,
    readiness: Readiness,
    authenticate: Authenticate = lambda _: ANONYMOUS,
    pages: Iterable[APIRouter] = (),
) -> FastAPI:
    """Build the application. `authenticate` maps a value of `Authorization` to its caller, or raises ServiceError.

    `pages` are the routes of web pages beside the API.
    """
    app = FastAPI(
        title="Quire",
        version=operations.server_version(),
        description="OpenAI's API with vLLM's extensions, and Anthropic's messages.",
        redirect_slashes=False,
    )
    app.state.handler = handler
    app.state.administration = administration
    app.state.readiness = readiness
    app.state.authenticate = authenticate
    app.add_exception_handler(ServiceError, for_messages(logged(error_responses.on_service_error)))
    app.add_exception_handler(HTTPException, for_messages(logged(error_responses.on_http_error)))
    app.add_exception_handler(RequestValidationError, for_messages(logged(error_responses.on_validation_error)))
    app.add_exception_handler(Exception, for_messages(error_responses.on_unexpected_error))
    for router in (
        generation.router,
        messages.router,
        models.router,
        operations.router,
        operations.open_router,
        *pages,
    ):
        app.include_router(router)
    _remove_validation_responses(app)
    return app


def _remove_validation_responses(app: FastAPI) -> None:
    """Remove FastAPI's status 422 from the OpenAPI description, because an invalid body gets 400 here."""
    original: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        description = original()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            description["components"]["schemas"].pop(name, None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
