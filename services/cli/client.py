"""What the commands that call a running Quire share: channels, health, and one generation."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services import transport

_RETRY_SECONDS = 0.05
_SERVING = health_pb2.HealthCheckResponse.SERVING


async def check_health(address: str, service: str, timeout: float) -> str:
    """Return the health status of a service by its name in the protocol. Raises grpc.aio.AioRpcError."""
    async with transport.channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def watch_until_ready(address: str, service: str) -> None:
    """Return as soon as a service is ready, however long that takes; whoever calls sets the limit."""
    while True:
        try:
            async with transport.channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
                    if answer.status == _SERVING:
                        return
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_RETRY_SECONDS)


async def generate(
    channel: grpc.aio.Channel, request: gateway_pb2.GenerateRequest, timeout: float
) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    """Yield the messages of one generation. Raises grpc.aio.AioRpcError."""
    async for response in gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=timeout):
        yield response
