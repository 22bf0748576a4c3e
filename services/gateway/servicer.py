"""The calls of the gateway: hand the message to the request handler, and its answer to the client."""

import re
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from quire.v1 import gateway_pb2 as pb
from quire.v1 import gateway_pb2_grpc as pb_grpc
from services.gateway.access.auth_interceptor import Authenticate, authorization_of, value_of
from services.gateway.access.callers import Caller, Origin
from services.gateway.administration import FleetAdministration
from services.gateway.parameters import MAX_REQUEST_ID_BYTES, new_request_id
from services.gateway.request_handler import RequestHandler
from services.gateway.text.utf8 import parse_request
from services.runtime.interceptors import Handler, HandlerInterceptor, Metadata
from services.runtime.statuses import abort_on_error

Context = grpc.aio.ServicerContext[Any, Any]

# Without a deadline of the caller's. Computing a long prefix behind a full queue takes its time.
ADMIN_TIMEOUT_SECONDS = 60.0

REQUEST_ID_METADATA = "x-request-id"
_SENDABLE_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_BYTES}}}")
_SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"]


class GatewayServicer(pb_grpc.GatewayServicer):
    """Answers clients."""

    def __init__(
        self, handler: RequestHandler, administration: FleetAdministration, authenticate: Authenticate
    ) -> None:
        """`authenticate` makes a caller of a value of `authorization`, or raises a ServiceError."""
        self._handler = handler
        self._administration = administration
        self._authenticate = authenticate

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream a generation.

        Written and not yielded: so the cancellation of a write that a client holds up comes out here, and has a status.
        """
        metadata: dict[str, str] = {}
        async with abort_on_error(context, metadata):
            metadata |= _named(request)
            with self._handler.slow_clients.named():
                async with aclosing(self._handler.generate(request, self._origin(context))) as responses:
                    async for response in responses:
                        await context.write(response)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Tokenize a prompt."""
        async with abort_on_error(context):
            return pb.TokenizeResponse(token_ids=await self._handler.token_ids(request.model, request.prompt))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Tell the text of tokens."""
        async with abort_on_error(context):
            return pb.DetokenizeResponse(text=await self._handler.text(request))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802
        """Describe a model."""
        async with abort_on_error(context):
            return self._handler.model(request.model)

    async def ListModels(self, _request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        """Describe all models."""
        async with abort_on_error(context):
            return pb.ListModelsResponse(models=self._handler.models())

    async def Admin(self, request: pb.AdminRequest, context: Context) -> pb.AdminResponse:  # noqa: N802
        """Change what is pinned."""
        async with abort_on_error(context):
            self._caller(context).require_operator()
            left = context.time_remaining()
            return await self._administration.administer(
                request, ADMIN_TIMEOUT_SECONDS if left is None else max(0.0, left)
            )

    def _origin(self, context: Context) -> Origin:
        parent = value_of("traceparent", context.invocation_metadata()) or ""
        return Origin(self._caller(context), "grpc", parent, context.time_remaining())

    def _caller(self, context: Context) -> Caller:
        """Return whose call it is; those of nobody the AuthInterceptor has refused."""
        return self._authenticate(authorization_of(context.invocation_metadata()))


class ParsingInterceptor(HandlerInterceptor):
    """Parses the gateway's requests so that one with invalid UTF-8 is refused with the name of its field."""

    service = _SERVICE.full_name

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Give the handler of a call another deserializer."""
        del metadata
        request_type = GetMessageClass(_SERVICE.methods_by_name[method].input_type)
        return handler._replace(request_deserializer=partial(parse_request, request_type))


def _named(request: pb.GenerateRequest) -> dict[str, str]:
    """Give a request without an id one, and return the metadata that says it if the request is refused.

    Metadata is printable ASCII: another id, which is the client's own, is left out.
    """
    request.request_id = request.request_id or new_request_id()
    return {REQUEST_ID_METADATA: request.request_id} if _SENDABLE_ID.fullmatch(request.request_id) else {}
