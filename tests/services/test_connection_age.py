"""Connections of clients have a maximum age, so that new gateways get load; requests in flight continue."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from quire.v1 import gateway_pb2_grpc
from services.runtime.http.connection import HttpLimits
from tests.faults import Streams, wait_until
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, RunningService, open_channel
from tests.scrape import Scrape
from tests.services.gateway.http.responses import events
from tests.services.gateway.http.scripted_server import CONNECTIONS, ScriptedServer

AGE_SECONDS = "0.3"
# 20 ms each: the stream is several times older than its connection may become.
TOKENS = 100
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}


def requests(gateway: RunningService) -> float:
    return sum(Scrape.of(gateway.metrics_url).values("quire_routed_requests_total", "reason").values())


def test_a_client_moves_to_a_new_gateway_at_its_address_and_its_stream_at_the_old_one_continues(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path: Path
) -> None:
    def gateway(name: str) -> RunningService:
        options = ("--max-connection-age-seconds", AGE_SECONDS, "--engines", tiny_quire.addresses["engine"])
        started = service("gateway", "--listen", f"unix:{tmp_path}/{name}", *options)
        started.output.wait_for("gateway is ready")
        return started

    old, new = gateway("old"), gateway("new")
    with open_channel(old.address) as channel:
        client = gateway_pb2_grpc.GatewayStub(channel)
        stream = Streams(client, [slow_request("Blocks of keys", TOKENS)], CALL_SECONDS)
        stream.wait_for_tokens(1)
        (tmp_path / "new").replace(tmp_path / "old")

        def is_served_by_the_new_one() -> bool:
            answer = Answer.of(client.Generate(prompt_request("Hi", 1), timeout=CALL_SECONDS))
            return len(answer.token_ids) == 1 and requests(new) > 0

        wait_until(is_served_by_the_new_one, "the client connects to the new gateway")
        assert stream.running() == 1
        ((tokens,), served_by_old) = stream.tokens(), requests(old)
    assert len(tokens) == TOKENS
    assert served_by_old >= 1


@pytest.mark.parametrize(("age_seconds", "closes"), [(0.0, False), (3600.0, False), (1e-9, True)])
def test_the_response_after_the_age_is_complete_and_the_last_of_its_http_connection(
    tiny_model: Callable[[str], Path], age_seconds: float, closes: bool
) -> None:
    limits = HttpLimits(CONNECTIONS, read_seconds=60, write_seconds=60, age_seconds=age_seconds)
    with (
        closing(ScriptedServer(tiny_model("llama"), limits)) as server,
        httpx.Client(base_url=server.url, timeout=CALL_SECONDS) as client,
    ):
        for _ in range(2):
            with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
                assert (answer.headers.get("connection") == "close") is closes
                assert len(list(events(answer))) > 1
            wait_until(lambda: bool(server.server._state.connections) is not closes, "the connection is closed or kept")
