"""What the commands that call a running Quire share: health, and one generation."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.cli.connection import Connection

Metadata = tuple[tuple[str, str], ...]


async def check_health(connection: Connection, service: str, timeout: float) -> str:
    """Return the health status of a service by its name in the protocol. Raises grpc.aio.AioRpcError."""
    async with connection.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def generate(
    channel: grpc.aio.Channel, request: gateway_pb2.GenerateRequest, timeout: float, metadata: Metadata = ()
) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    """Yield the messages of one generation. Raises grpc.aio.AioRpcError."""
    async for response in gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=timeout, metadata=metadata):
        yield response
