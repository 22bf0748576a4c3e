"""Both ends of every TCP connection have Nagle's algorithm off."""

import asyncio
import logging
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
from tests.certificates import Authority
from tests.scrape import Scrape
from tests.services.runtime.http.sockets import Connection, connections

NO_ENGINE = "127.0.0.1:1"


def listening(caplog: pytest.LogCaptureFixture, what: str) -> str:
    return next(one.getMessage() for one in caplog.records if what in one.getMessage()).split(" at ")[1]


@asynccontextmanager
async def gateway(host: str, authority: Authority | None = None) -> AsyncIterator[str]:
    """Start a gateway, with TLS if an authority is given; yield its gRPC address."""
    certificate, key = authority.issue("gateway") if authority else ("", "")
    settings = GatewaySettings(
        listen=f"{host}:0",
        http_listen=f"{host}:0",
        engines=NO_ENGINE,
        tls_certificate=str(certificate),
        tls_key=str(key),
    )
    service = GatewayService(settings)
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


async def spoken(url: str, context: ssl.SSLContext | None = None) -> list[Connection]:
    """Send a request on a new connection, and return its ends."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, ssl=context)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readline()
    found = ends(url)
    writer.close()
    return found


def test_every_http_listener_sends_at_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)

    async def ask(host: str, authority: Authority | None = None) -> list[Connection]:
        caplog.clear()
        context = ssl.create_default_context(cafile=str(authority.ca)) if authority else None
        async with gateway(host, authority):
            return await spoken(listening(caplog, "listens for HTTP"), context)

    async def ask_all() -> list[list[Connection]]:
        return [await ask("127.0.0.1"), await ask("[::1]"), await ask("127.0.0.1", Authority(tmp_path))]

    assert [{one.no_delay for one in found} for found in asyncio.run(ask_all())] == [{True}] * 3


def test_the_block_map_is_sent_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def ask() -> list[Connection]:
        manager = KVManagerService(KVManagerSettings(listen="127.0.0.1:0", map_listen="127.0.0.1:0"))
        await manager.start()
        try:
            return await spoken(listening(caplog, "block map at"))
        finally:
            await manager.stop()

    assert {one.no_delay for one in asyncio.run(ask())} == {True}


class ConnectionCollector(Collector):
    """Records the connections of the metrics server during a scrape; they are closed after it."""

    def __init__(self) -> None:
        self.url = ""
        self.found: list[Connection] = []

    def collect(self) -> Iterable[Metric]:
        if self.url:
            self.found = ends(self.url)
        return ()


def test_the_metrics_page_is_sent_at_once() -> None:
    async def ask() -> list[Connection]:
        registry, collector = CollectorRegistry(), ConnectionCollector()
        registry.register(collector)
        async with metrics_server(Exposition(registry, "127.0.0.1:0")) as url:
            collector.url = url
            await asyncio.to_thread(Scrape.of, url)
        return collector.found

    assert {one.no_delay for one in asyncio.run(ask())} == {True}


def test_links_and_clients_send_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def ask() -> list[list[Connection]]:
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
            return [link, load]

    found = asyncio.run(ask())
    assert [len(ends) for ends in found] == [2, 2], "a client's end, and the server's"
    assert [{one.no_delay for one in both} for both in found] == [{True}] * 2
