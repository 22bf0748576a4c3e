"""Two gateways of one engine are replaced one after the other, behind a client that retries as clients of gRPC do."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from quire.v1 import gateway_pb2_grpc
from services import transport
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningService

CLIENTS = 6
TOKENS = 24
RETRIES = {
    "loadBalancingConfig": [{"round_robin": {}}],
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

    gateways = [start("127.0.0.1:0") for _ in range(2)]
    addresses = [gateway.address for gateway in gateways]
    options = [*transport.channel_options(), ("grpc.service_config", json.dumps(RETRIES))]
    over, answered = threading.Event(), threading.Semaphore(0)

    def ask() -> list[int]:
        lengths = []
        with grpc.insecure_channel("ipv4:" + ",".join(addresses), options=options) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            while not over.is_set():
                answer = Answer.of(stub.Generate(prompt_request("Once more", TOKENS), timeout=CALL_SECONDS))
                lengths.append(len(answer.token_ids))
                answered.release()
        return lengths

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(ask) for _ in range(CLIENTS)]
        try:
            for gateway in gateways:
                for _ in range(2 * CLIENTS):
                    assert answered.acquire(timeout=CALL_SECONDS)
                assert gateway.close() == 0
                start(gateway.address)
            for _ in range(2 * CLIENTS):
                assert answered.acquire(timeout=CALL_SECONDS)
        finally:
            over.set()
        assert {length for client in clients for length in client.result()} == {TOKENS}
