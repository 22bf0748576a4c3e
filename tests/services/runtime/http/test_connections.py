"""Both ends of every TCP connection have Nagle's algorithm off."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.loadgen.clients.openai_client import OpenAIClient
from services.loadgen.clients.target import Target, Unreachable
from services.loadgen.workload.prompts import PromptMaker
from services.runtime import transport
from services.runtime.metrics.page import Exposition
from services.runtime.metrics.server import metrics_server
from services.runtime.service import Readiness
from tests.certificates import Authority
from tests.scrape import Scrape
from tests.services.runtime.http.sockets import Connection, connections

pytestmark = pytest.mark.anyio

NO_ENGINE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def listening(caplog: pytest.LogCaptureFixture, what: str) -> str:
    return next(one.getMessage() for one in caplog.records if what in one.getMessage()).split(" at ")[1]


@asynccontextmanager
async def gateway(host: str, authority: Authority | None = None) -> AsyncIterator[str]:
    """Start a gateway, with TLS if an authority is given; yield its gRPC address."""
    certificate, key = authority.issue("gateway") if authority else ("", "")
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    service = GatewayService(GatewaySettings(listen=f"{host}:0", http_listen=f"{host}:0", engines=NO_ENGINE, **files))
    try:
        yield await service.start()
    finally:
        await service.stop()


def ends(url: str) -> list[Connection]:
    """Return both ends of the connections to a server in this process."""
    port = urlsplit(url).port
    assert port is not None
    found = connections(port)
    assert any(one.own[1] == port for one in found), "no connection was accepted"
    return found


def assert_at_once(connections: list[Connection]) -> None:
    assert {one.no_delay for one in connections} == {True}


async def ends_of_request(url: str, context: ssl.SSLContext | None = None) -> list[Connection]:
    """Send a request on a new connection, and return its ends."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, ssl=context)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readline()
    found = ends(url)
    writer.close()
    return found


def test_a_search_for_connections_keeps_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)) as server:
        before = sorted(Path("/proc/self/fd").iterdir())
        assert connections(server.getsockname()[1]) == []
        assert sorted(Path("/proc/self/fd").iterdir()) == before


async def test_every_http_listener_sends_at_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for host, authority in (("127.0.0.1", None), ("[::1]", None), ("127.0.0.1", Authority(tmp_path))):
        caplog.clear()
        context = ssl.create_default_context(cafile=str(authority.ca)) if authority else None
        async with gateway(host, authority):
            assert_at_once(await ends_of_request(listening(caplog, "listens for HTTP"), context))


async def test_the_block_map_is_sent_at_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = KVManagerService(KVManagerSettings(listen="127.0.0.1:0", map_listen="127.0.0.1:0"))
    await manager.start()
    try:
        assert_at_once(await ends_of_request(listening(caplog, "block map at")))
    finally:
        await manager.stop()


class ConnectionCollector(Collector):
    """Records the connections of the metrics server during a scrape; they are closed after it."""

    def __init__(self) -> None:
        self.url = ""
        self.found: list[Connection] = []

    def collect(self) -> Iterable[Metric]:
        if self.url:
            self.found = ends(self.url)
        return ()


async def test_the_metrics_page_is_sent_at_once() -> None:
    registry, collector = CollectorRegistry(), ConnectionCollector()
    registry.register(collector)
    async with metrics_server(Exposition(registry, "127.0.0.1:0"), Readiness()) as url:
        collector.url = url
        await asyncio.to_thread(Scrape.of, url)
    assert_at_once(collector.found)


async def test_links_and_clients_send_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway("127.0.0.1") as address:
        async with transport.channel(address) as channel:
            while (state := channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
            link = ends(f"//{address}")
        url = listening(caplog, "listens for HTTP")
        client = OpenAIClient(Target("completions", url), PromptMaker(1, 0), lambda: 0.0)
        with pytest.raises(Unreachable, match="no model"):
            await client.describe()
        load = ends(url)
        await client.close()
    for both in (link, load):
        assert len(both) == 2, "a client's end, and the server's"
        assert_at_once(both)
