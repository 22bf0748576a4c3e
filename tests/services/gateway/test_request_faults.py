import asyncio
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
from tests.services.gateway.handler_in_process import running_service

TOKENS = 40
GUILTY = "the word of the guilty request"


class Oops(Exception):
    pass


@pytest.mark.parametrize("method", ["_delta", "_write_tokens"])
def test_an_internal_error_fails_only_its_request(
    method: str, tiny_quire: RunningQuire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the task of the request meets it, or the link to the engine, which writes tokens."""
    faultless = getattr(Generation, method)

    def with_fault(generation: Generation, *arguments: object) -> object:
        if generation.request.request.cache.salt == GUILTY:
            raise Oops("secret")
        return faultless(generation, *arguments)

    monkeypatch.setattr(Generation, method, with_fault)
    request = prompt_request("The quick brown fox", TOKENS)
    guilty = prompt_request("The quick brown fox", TOKENS)
    guilty.cache.salt = GUILTY

    address = f"unix:{tmp_path}/gateway.sock"
    settings = GatewaySettings(listen=address, engines=tiny_quire.addresses["engine"], http_listen="")

    async def run() -> list[int]:
        service = GatewayService(settings)
        async with running_service(service), transport.channel(address) as channel:
            await service.readiness.wait()
            stub = gateway_pb2_grpc.GatewayStub(channel)

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
