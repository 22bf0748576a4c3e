"""An internal error of the gateway at one request fails only that request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2_grpc
from services.gateway.generation import Generation
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.runtime import transport
from tests.load import prompt_request
from tests.running_quire import RunningQuire

TOKENS = 40
GUILTY = "the stop string of the guilty request"


class Oops(Exception):
    """Raised inside the gateway by the test."""


@asynccontextmanager
async def gateway(quire: RunningQuire, folder: Path) -> "AsyncIterator[gateway_pb2_grpc.GatewayAsyncStub]":
    """Run a gateway in this process with the engine of a Quire."""
    address = f"unix:{folder}/gateway.sock"
    service = GatewayService(GatewaySettings(listen=address, engines=quire.addresses["engine"], http_listen=""))
    await service.start()
    running = asyncio.create_task(service.run())
    try:
        await service.readiness.wait()
        async with transport.channel(address) as channel:
            yield gateway_pb2_grpc.GatewayStub(channel)  # type: ignore[misc]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await service.stop()


def test_an_internal_error_fails_only_its_request(
    tiny_quire: RunningQuire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = Generation._delta

    def with_delta(generation: Generation, index: int, batch: object) -> object:
        if GUILTY in generation.request.parameters.stopping.strings:
            raise Oops("secret")
        return delta(generation, index, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Generation, "_delta", with_delta)
    request = prompt_request("The quick brown fox", TOKENS)
    guilty = prompt_request("The quick brown fox", TOKENS)
    guilty.stopping.stop_strings.append(GUILTY)

    async def run() -> list[int]:
        async with gateway(tiny_quire, tmp_path) as stub:

            async def tokens() -> list[int]:
                return [token async for one in stub.Generate(request, timeout=60) for token in one.delta.token_ids]

            neighbour = asyncio.create_task(tokens())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(guilty, timeout=60):
                    pass
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details() == "internal error of the gateway: Oops"
            found = await neighbour
            assert await tokens() == found, "later requests succeed"
            return found

    assert asyncio.run(run()) == tiny_quire.generate(request).token_ids
    assert tiny_quire.settled_pool().sequences == 0, "the failed request was cancelled at the engine"
