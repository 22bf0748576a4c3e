"""A registry over HTTP, read on the event loop."""

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.cli.metrics_page import Shown
from services.cli.metrics_server import metrics_server
from services.transport import AddressUnavailable
from tests.scrape import Scrape


class Where(Collector):
    """Shows on which thread it is read."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("reading_thread", "Identity.", value=threading.get_ident())


def shown(address: str = "127.0.0.1:0") -> Shown:
    registry = CollectorRegistry()
    registry.register(Where())
    return Shown(registry, address)


def test_the_registry_is_read_on_the_event_loop_while_others_wait_for_the_answer() -> None:
    async def scrape() -> list[Scrape]:
        async with metrics_server(shown()) as url:
            return await asyncio.gather(*(asyncio.to_thread(Scrape.of, url) for _ in range(4)))

    scrapes = asyncio.run(scrape())
    assert [one.value("reading_thread") for one in scrapes] == [threading.get_ident()] * 4


def test_nothing_is_shown_after_the_end_and_the_port_is_free_again() -> None:
    async def show_twice() -> None:
        async with metrics_server(shown()) as url:
            pass
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(Scrape.of, url)
        async with metrics_server(shown(url.split("/")[2])) as again:
            assert again == url

    asyncio.run(show_twice())


def test_an_address_that_is_taken_is_refused() -> None:
    async def show() -> None:
        async with metrics_server(shown()) as url, metrics_server(shown(url.split("/")[2])):
            pass

    with pytest.raises(AddressUnavailable, match="Address already in use"):
        asyncio.run(show())
