"""The standard health service: liveness under the empty name, readiness under the service's name.

grpcio-health-checking is not used, because the first watcher that disconnects silences all others of its service.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from services.runtime.service import Readiness

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Reports the health of one service."""

    def __init__(self, name: str, readiness: Readiness) -> None:
        self._name = name
        self._readiness = readiness

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802
        """Return the current status. NOT_FOUND for the name of another service."""
        if request.service not in ("", self._name):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}: this is {self._name}")
        return _status(not request.service or self._readiness.ready)

    async def Watch(self, request: HealthCheckRequest, _context: Context) -> AsyncIterator[HealthCheckResponse]:  # noqa: N802
        """Yield the current status, then each change."""
        if request.service == self._name:
            async for ready in self._readiness.changes():
                yield _status(ready)
        else:
            yield HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN) if request.service else _status(True)
            await asyncio.get_running_loop().create_future()  # these never change


def _status(serving: bool) -> HealthCheckResponse:
    return HealthCheckResponse(status=HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)
