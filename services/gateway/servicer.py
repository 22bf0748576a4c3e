"""The gateway's gRPC servicer: passes requests to the request handler, and its responses to the client."""

import re
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from quire.v1 import gateway_pb2 as pb
from quire.v1 import gateway_pb2_grpc as pb_grpc
from services.gateway.access.auth_interceptor import Authenticate, authorization_of, value_of
from services.gateway.access.callers import Caller, Origin
from services.gateway.access.response_writer import ResponseWriter
from services.gateway.access.unfinished_calls import UnfinishedCalls
from services.gateway.administration import ADMIN_TIMEOUT_SECONDS, FleetAdministration
from services.gateway.generation import EncodedResponse
from services.gateway.request_checks import MAX_REQUEST_ID_BYTES, new_request_id
from services.gateway.request_handler import RequestHandler
from services.gateway.text.utf8 import parse_request
from services.runtime.interceptors import Handler, HandlerInterceptor, Metadata
from services.runtime.statuses import abort_on_error

Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_ID_METADATA = "x-request-id"
_PRINTABLE_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_BYTES}}}")
_SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"]


class GatewayServicer(pb_grpc.GatewayServicer):
    """Serves clients over gRPC."""

    def __init__(
        self, handler: RequestHandler, administration: FleetAdministration, authenticate: Authenticate
    ) -> None:
        """`authenticate` returns the caller for a value of `authorization`, or raises a ServiceError."""
        self._handler = handler
        self._administration = administration
        self._authenticate = authenticate
        self.unfinished = UnfinishedCalls()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream a generation.

        Responses are written, not yielded, so that cancelling a blocked write raises here and gets a status.
        """
        metadata: dict[str, str] = {}
        async with abort_on_error(context, metadata):
            metadata |= _request_id_metadata(request)
            with self.unfinished.watched(), self._handler.slow_clients.translated():
                await self._write_responses(request, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Tokenize a prompt."""
        async with abort_on_error(context):
            token_ids = await self._handler.token_ids(request.model, request.prompt, self._caller(context))
            return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Return the text of token ids."""
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
        """Change pinned prefixes, or reset the prefix cache. Operators only."""
        async with abort_on_error(context):
            self._caller(context).require_operator()
            left = context.time_remaining()
            return await self._administration.administer(
                request, ADMIN_TIMEOUT_SECONDS if left is None else max(0.0, left)
            )

    async def _write_responses(self, request: pb.GenerateRequest, context: Context) -> None:
        with closing(ResponseWriter[EncodedResponse](context.write)) as writer:
            responses = self._handler.generate(request, self._origin(context), writer=writer)
            async with aclosing(responses):
                async for response in responses:
                    await writer.write(response)
            await writer.finish()

    def _origin(self, context: Context) -> Origin:
        parent = value_of("traceparent", context.invocation_metadata()) or ""
        return Origin(self._caller(context), "grpc", parent, context.time_remaining())

    def _caller(self, context: Context) -> Caller:
        """Return the caller; AuthInterceptor has rejected calls without a valid key."""
        return self._authenticate(authorization_of(context.invocation_metadata()))


class ParsingInterceptor(HandlerInterceptor):
    """Parses the gateway's requests so that invalid UTF-8 is rejected with the name of its field.

    Responses may be encoded already.
    """

    service = _SERVICE.full_name

    def wrap_handler(self, handler: Handler, method: str, metadata: Metadata) -> Handler:
        """Replace the deserializer and the serializer of a call's handler."""
        del metadata
        request_type = GetMessageClass(_SERVICE.methods_by_name[method].input_type)
        return handler._replace(
            request_deserializer=partial(parse_request, request_type), response_serializer=_serialized
        )


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _request_id_metadata(request: pb.GenerateRequest) -> dict[str, str]:
    """Set a missing request id, and return the metadata that names it in an error.

    Metadata is printable ASCII, so an id with other characters is left out; the client chose it itself.
    """
    request.request_id = request.request_id or new_request_id()
    return {REQUEST_ID_METADATA: request.request_id} if _PRINTABLE_ID.fullmatch(request.request_id) else {}
