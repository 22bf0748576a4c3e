"""The engine without a model, and clients of benchmarks."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.loads import stream_client
from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import wait_until
from tests.running_quire import Answer, RunningService

LONG = 65536
MICROSECONDS = 40


@pytest.fixture(scope="module")
def services(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningService]]:
    """A KV manager, an engine of 10,000 blocks, and a gateway."""
    folder = tmp_path_factory.mktemp("sockets")
    at = {name: f"unix:{folder}/{name}.sock" for name in ("kvmanager", "engine", "gateway")}
    with ExitStack() as running:

        def start(label: str, *arguments: str, module: str = "") -> RunningService:
            return running.enter_context(
                closing(RunningService(label, "--listen", at[label], *arguments, module=module))
            )

        started = {"kvmanager": start("kvmanager")}
        options = ("--kvmanager", at["kvmanager"], "--model", str(tiny_model("llama")), "--device-blocks", "10000")
        pace = ("--microseconds-per-token", str(MICROSECONDS))
        started["engine"] = start("engine", *options, *pace, module="bench.loads.null_engine")
        started["gateway"] = start("gateway", "--engines", at["engine"])
        started["gateway"].output.wait_for("gateway is ready")
        yield started


def generate(services: dict[str, RunningService], token_ids: list[int], max_tokens: int) -> Answer:
    request = gateway_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend(token_ids)
    request.stopping.max_tokens = max_tokens
    return Answer.of(gateway_pb2_grpc.GatewayStub(services["gateway"].channel).Generate(request, timeout=60))


def test_a_long_prompt_takes_the_configured_time_and_is_cached(services: dict[str, RunningService]) -> None:
    prompt = [number % 1_000_000 for number in range(7, 7 + LONG)]
    begun = time.monotonic()
    answer = generate(services, prompt, 5)
    computed = time.monotonic()
    assert answer.token_ids == [100] * 5
    assert computed - begun > LONG * MICROSECONDS / 1e6
    assert answer.started.cached_tokens == 0
    assert generate(services, prompt, 5).started.cached_tokens == LONG - 16
    assert time.monotonic() - computed < computed - begun
    kvmanager = kvmanager_pb2_grpc.KVManagerStub(services["kvmanager"].channel)

    def cached() -> int:
        return kvmanager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=10).pool.device.cached

    wait_until(lambda: cached() >= LONG // 16, "the prompt's blocks are released, in slices")
    assert kvmanager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=10).pool.device_blocks == 10000


def test_the_stream_client_receives_all_tokens_of_all_streams(services: dict[str, RunningService]) -> None:
    work = [{"prompt": [20 + number] * 9, "tokens": 5} for number in range(6)]
    figures = asyncio.run(stream_client.run(services["gateway"].address, work))
    assert figures["cpu_seconds"] > 0
    assert figures["seconds"] > 0
