"""A rolling restart of two gateways loses no request of clients that watch their health and retry."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2_grpc
from services.runtime import transport
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningService
from tests.scrape import Scrape

CLIENTS = 6
TOKENS = 24
RETRIES = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "quire.v1.Gateway"},
    "methodConfig": [
        {
            "name": [{"service": "quire.v1.Gateway"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
OPTIONS = [("grpc.service_config", json.dumps(RETRIES)), ("grpc.max_reconnect_backoff_ms", 500)]


@pytest.fixture
def service() -> Iterator[Callable[..., RunningService]]:
    with ExitStack() as running:

        def start(label: str, *arguments: str) -> RunningService:
            one = RunningService(label, *arguments)
            running.callback(one.close)
            return one

        yield start


def test_a_rolling_restart_of_two_gateways_loses_no_request(
    tiny_model: Callable[[str], Path], service: Callable[..., RunningService]
) -> None:
    kvmanager = service("kvmanager", "--listen", "127.0.0.1:0")
    engine = service(
        *("engine", "--listen", "127.0.0.1:0", "--kvmanager", kvmanager.address, "--model", str(tiny_model("llama"))),
        *("--device", "cpu", "--threads", "1", "--device-blocks", "256"),
    )

    def start(listen: str) -> RunningService:
        gateway = service("gateway", "--listen", listen, "--engines", engine.address)
        gateway.output.wait_for("gateway is ready")
        return gateway

    # At a separate address, so that no other process uses the port of a stopped gateway.
    gateways = [start("127.0.0.2:0") for _ in range(2)]
    addresses = [gateway.address for gateway in gateways]
    options = [*transport.channel_options(), *OPTIONS]
    over, answered = threading.Event(), threading.Semaphore(0)

    def send(stub: gateway_pb2_grpc.GatewayStub) -> list[int]:
        lengths = []
        while not over.is_set():
            answer = Answer.of(stub.Generate(prompt_request("Hello again", TOKENS), timeout=CALL_SECONDS))
            lengths.append(len(answer.token_ids))
            answered.release()
        return lengths

    def wait_for_use(gateway: RunningService) -> None:
        while not Scrape.of(gateway.metrics_url).has("quire_routed_requests_total"):
            assert answered.acquire(timeout=CALL_SECONDS)

    with (
        grpc.insecure_channel("ipv4:" + ",".join(addresses), options=options) as channel,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        clients = [threads.submit(send, gateway_pb2_grpc.GatewayStub(channel)) for _ in range(CLIENTS)]
        try:
            for gateway in gateways:
                wait_for_use(gateway)
            for gateway in gateways:
                assert gateway.close() == 0
                wait_for_use(start(gateway.address))
        finally:
            over.set()
        assert {length for client in clients for length in client.result()} == {TOKENS}
