"""The client of Quire's gateways, against a scripted gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.loadgen.clients.grpc_client import GrpcClient
from services.loadgen.clients.target import RequestFailed, Target
from services.loadgen.records import Record
from services.loadgen.workload.prompts import Kind, Piece, PromptMaker
from services.runtime import transport
from tests.services.runtime.test_transport import serving

pytestmark = pytest.mark.anyio

Response = gateway_pb2.GenerateResponse
PROMPT = (Piece((Kind.UNIQUE, 0), 5),)


class Gateway(gateway_pb2_grpc.GatewayServicer):
    """Answers with these messages and this status."""

    def __init__(self, *messages: Response, code: grpc.StatusCode | None = None, trailing: Any = ()) -> None:
        self._messages = messages
        self._code = code
        self._trailing = trailing
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.keys: list[str] = []
        self.peers: set[str] = set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        self.requests.append(request)
        self.peers.add(context.peer())
        self.keys += [value for name, value in context.invocation_metadata() if name == "authorization"]
        for message in self._messages:
            yield message
        if self._code is not None:
            await context.abort(self._code, "come later", self._trailing)


async def sent(gateway: Gateway, clock: Callable[[], float] = lambda: 0.0, count: int = 1) -> Record:
    """Send `count` requests at once, and return the record of the last."""
    server = transport.server(transport.CLIENT_MESSAGE_BYTES)
    gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, server)
    async with serving(server) as address:
        client = GrpcClient(Target("grpc", address, "m", "sesame"), PromptMaker(0, 1000), clock)
        records = [Record(number, number, 5, 4, 0.0) for number in range(count)]
        try:
            await asyncio.gather(*(client.send(client.prepare(PROMPT, 4), record) for record in records))
        finally:
            await client.close()
    return records[-1]


def delta(*token_ids: int) -> Response:
    return Response(delta=gateway_pb2.Delta(token_ids=token_ids))


def finished() -> Response:
    usage = gateway_pb2.Usage(prompt_tokens=5, cached_tokens=2, generated_tokens=4, recomputed_tokens=3)
    timing = gateway_pb2.Timing(queued=Duration(seconds=1, nanos=500_000_000), preemptions=1, failovers=2)
    return Response(finished=gateway_pb2.Finished(usage=usage, timing=timing))


async def test_tokens_are_counted_on_receipt_and_corrected_by_the_servers_usage() -> None:
    moments = iter((1.0, 2.5))
    gateway = Gateway(Response(started=gateway_pb2.Started()), delta(1), delta(2, 3, 4), delta(), finished())
    record = await sent(gateway, lambda: next(moments))
    assert (record.times.tolist(), record.counts.tolist()) == ([1.0, 2.5], [1, 3])
    assert vars(record.usage) == {
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "output_tokens": 4,
        "preemptions": 1,
        "recomputed_tokens": 3,
        "failovers": 2,
        "queued_seconds": 1.5,
    }
    (request,) = gateway.requests
    assert list(request.prompt.token_ids.ids) == PromptMaker(0, 1000).token_ids(PROMPT)
    assert (request.model, request.stopping.max_tokens, request.stopping.ignore_eos) == ("m", 4, True)
    assert request.sampling.temperature == 0
    assert gateway.keys == ["Bearer sesame"]


async def test_a_refusal_has_a_retry_time() -> None:
    packed = Packed()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=250_000_000)))
    details = status_pb2.Status(code=8, message="come later", details=[packed])
    trailing = (("grpc-status-details-bin", details.SerializeToString()),)
    with pytest.raises(RequestFailed, match="come later") as failed:
        await sent(Gateway(code=grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=trailing))
    assert (failed.value.status, failed.value.retry_after) == ("RESOURCE_EXHAUSTED", 2.25)


@pytest.mark.parametrize("trailing", [(), (("grpc-status-details-bin", b"\xff\xff"),)])
async def test_a_refusal_without_a_retry_time_is_counted_too(trailing: Any) -> None:
    with pytest.raises(RequestFailed) as failed:
        await sent(Gateway(delta(1), code=grpc.StatusCode.UNAVAILABLE, trailing=trailing))
    assert (failed.value.status, failed.value.retry_after) == ("UNAVAILABLE", None)


async def test_a_stream_without_its_last_message_counts_as_failed() -> None:
    with pytest.raises(RequestFailed) as failed:
        await sent(Gateway(delta(1)))
    assert failed.value.status == "cut short"


async def test_streams_beyond_the_limit_of_a_connection_use_another_one() -> None:
    gateway = Gateway(finished())
    await sent(gateway, count=600)
    assert len(gateway.requests) == 600
    assert len(gateway.peers) == 2
