"""Client of a Quire gateway over gRPC: prompts are token ids, and each message has its token count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.loadgen.clients.target import RequestFailed, Server, Target, Unreachable
from services.loadgen.records import Record, Usage
from services.loadgen.workload.prompts import Prompt, PromptMaker
from services.runtime import transport
from services.runtime.tls import ClientTLS

_DESCRIBE_SECONDS = 30
# Servers refuse streams of one connection beyond a limit, Quire's beyond 1024.
_STREAMS_PER_CONNECTION = 500
_STATUS_DETAILS = "grpc-status-details-bin"


@dataclass
class _Connection:
    """A channel with its own connection, and its running streams."""

    channel: grpc.aio.Channel
    gateway: Any
    streams: int = 0


class GrpcClient:
    """Connections to a gateway, as many as its streams need."""

    def __init__(self, target: Target, prompts: PromptMaker, clock: Callable[[], float]) -> None:
        self._target = target
        self._prompts = prompts
        self._clock = clock
        self._tls = None if target.tls is None else ClientTLS(target.tls, target.server_name)
        self._connections = [self._connect()]
        self._metadata = (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()

    async def describe(self) -> Server:
        """Fetch the model's description. Raises Unreachable."""
        request = gateway_pb2.GetModelRequest(model=self._target.model)
        try:
            gateway = self._connections[0].gateway
            model = await gateway.GetModel(request, timeout=_DESCRIBE_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"{self._target.address}: {error.code().name}: {error.details()}") from error
        details = {
            "block_size": model.block_size,
            "device_blocks": model.device_blocks,
            "dtype": model.dtype,
            "engines": model.engines,
        }
        return Server(model.model, model.vocabulary_size, model.context_tokens, details)

    def prepare(self, prompt: Prompt, output_tokens: int) -> gateway_pb2.GenerateRequest:
        """Build the request."""
        request = gateway_pb2.GenerateRequest(model=self._target.model)
        request.prompt.token_ids.ids.extend(self._prompts.token_ids(prompt))
        if self._target.temperature is not None:
            request.sampling.temperature = self._target.temperature
        request.stopping.max_tokens = output_tokens
        request.stopping.ignore_eos = self._target.ignore_eos
        return request

    async def send(self, request: gateway_pb2.GenerateRequest, record: Record) -> None:
        """Run one generation. Raises RequestFailed."""
        connection = self._free_connection()
        connection.streams += 1
        try:
            finished = await self._stream(connection.gateway, request, record)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "", retry_seconds(error)) from error
        finally:
            connection.streams -= 1
        if finished is None:
            raise RequestFailed("cut short", "the stream ended without its last message")
        record.usage = _usage(finished)

    async def close(self) -> None:
        """Close the channels."""
        for connection in self._connections:
            await connection.channel.close()

    async def _stream(
        self, gateway: Any, request: gateway_pb2.GenerateRequest, record: Record
    ) -> gateway_pb2.Finished | None:
        """Read one generation; return its last message, None if there was none. Raises grpc.aio.AioRpcError."""
        finished = None
        async for response in gateway.Generate(request, timeout=self._target.timeout_seconds, metadata=self._metadata):
            if tokens := len(response.delta.token_ids):
                record.add_tokens(tokens, self._clock())
            elif response.HasField("finished"):
                finished = response.finished
        return finished

    def _free_connection(self) -> _Connection:
        """Return the first connection with room for a stream, or a new one."""
        found = next((one for one in self._connections if one.streams < _STREAMS_PER_CONNECTION), None)
        if found is None:
            found = self._connect()
            self._connections.append(found)
        return found

    def _connect(self) -> _Connection:
        channel = transport.channel(self._target.address, tls=self._tls)
        return _Connection(channel, gateway_pb2_grpc.GatewayStub(channel))


def retry_seconds(error: grpc.aio.AioRpcError) -> float | None:
    """Return the retry delay of google.rpc.RetryInfo in a status' details."""
    from google.rpc import error_details_pb2, status_pb2

    packed = next((value for name, value in error.trailing_metadata() or () if name == _STATUS_DETAILS), None)
    if packed is None:
        return None
    try:
        details = status_pb2.Status.FromString(packed).details
        for detail in details:
            info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                return float(info.retry_delay.ToTimedelta().total_seconds())
    except DecodeError:
        pass
    return None


def _usage(finished: gateway_pb2.Finished) -> Usage:
    usage, timing = finished.usage, finished.timing
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.generated_tokens,
        preemptions=timing.preemptions,
        recomputed_tokens=usage.recomputed_tokens,
        failovers=timing.failovers,
        queued_seconds=timing.queued.ToTimedelta().total_seconds(),
    )
