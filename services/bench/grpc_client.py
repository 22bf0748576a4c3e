"""Asks a Quire gateway by gRPC: prompts are token ids, and each message says how many tokens it brings."""

from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services import transport
from services.bench.prompts import Prompt, PromptMaker
from services.bench.records import Record, Usage
from services.bench.target import RequestFailed, Server, Target, Unreachable
from services.tls import ClientTLS

_DESCRIBE_SECONDS = 30
_STATUS_DETAILS = "grpc-status-details-bin"


class GrpcClient:
    """A channel to a gateway."""

    def __init__(self, target: Target, prompts: PromptMaker, clock: Callable[[], float]) -> None:
        self._target = target
        self._prompts = prompts
        self._clock = clock
        tls = None if target.tls is None else ClientTLS(target.tls, target.server_name)
        self._channel = transport.channel(target.address, tls=tls)
        self._gateway = gateway_pb2_grpc.GatewayStub(self._channel)
        self._metadata = (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()

    async def describe(self) -> Server:
        """Ask for the model. Raises Unreachable."""
        request = gateway_pb2.GetModelRequest(model=self._target.model)
        try:
            model = await self._gateway.GetModel(request, timeout=_DESCRIBE_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"{self._target.address}: {error.code().name}: {error.details()}") from error
        told = {
            "block_size": model.block_size,
            "device_blocks": model.device_blocks,
            "dtype": model.dtype,
            "engines": model.engines,
        }
        return Server(model.model, model.vocabulary_size, model.context_tokens, told)

    def prepare(self, prompt: Prompt, output_tokens: int) -> gateway_pb2.GenerateRequest:
        """Make the request."""
        request = gateway_pb2.GenerateRequest(model=self._target.model)
        request.prompt.token_ids.ids.extend(self._prompts.token_ids(prompt))
        if self._target.temperature is not None:
            request.sampling.temperature = self._target.temperature
        request.stopping.max_tokens = output_tokens
        request.stopping.ignore_eos = self._target.ignore_eos
        return request

    async def send(self, request: gateway_pb2.GenerateRequest, record: Record) -> None:
        """Run one generation. Raises RequestFailed."""
        finished = None
        try:
            call = self._gateway.Generate(request, timeout=self._target.timeout_seconds, metadata=self._metadata)
            async for response in call:
                if tokens := len(response.delta.token_ids):
                    record.came(tokens, self._clock())
                elif response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "", retry_seconds(error)) from error
        if finished is None:
            raise RequestFailed("cut short", "the stream ended without its last message")
        record.usage = _usage(finished)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def retry_seconds(error: grpc.aio.AioRpcError) -> float | None:
    """Return when the server asked to come again: google.rpc.RetryInfo among a status' details."""
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
