"""The metrics page over HTTP."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from services.runtime.http.connection import HttpLimits
from services.runtime.metrics.page import Exposition, MetricsPage
from services.runtime.metrics.server import metrics_server
from services.runtime.transport import AddressUnavailable
from tests.scrape import Scrape


class Where(Collector):
    """Exports the thread that reads it."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("reading_thread", "Identity.", value=threading.get_ident())


class Broken(Collector):
    """Fails."""

    def collect(self) -> Iterable[Metric]:
        raise OSError("no such figure")


class Odd(Collector):
    """Exports each type of metric, with texts and values that need escaping."""

    def collect(self) -> Iterable[Metric]:
        texts = ("", " ", '"', "\\", "\n", "\\n", "a,b", 'a="b"', "}", "\x85", "\u2028", "漢", "0.0", "\r")
        values = (0, 1.5, -1e-9, 1e6, 1e7, 12345678.9, 1e300, float("inf"), float("-inf"), float("nan"), True)
        odd = GaugeMetricFamily("odd", 'Of \\ and\nanother line, "quoted".', labels=("text", "and"))
        for text in texts:
            odd.add_metric((text, f"x{text}"), 1)
        numbers = GaugeMetricFamily("numbers", "Values.", labels=("number",))
        for number, value in enumerate(values):
            numbers.add_metric((str(number),), value)
        counter = CounterMetricFamily("vllm:counter", "Counts.", labels=("b", "a"))
        counter.add_metric(("1", "2"), 3)
        histogram = HistogramMetricFamily("histogram", "Spreads.", labels=("a",))
        histogram.add_metric(("1",), [("0.5", 1), ("+Inf", 2)], 3.5)
        yield from (odd, numbers, counter, histogram, GaugeMetricFamily("none", "Has no series.", labels=("a",)))
        yield InfoMetricFamily("info", "Tells.", {"version": "1"})


def shown(address: str = "127.0.0.1:0") -> Exposition:
    registry = CollectorRegistry()
    registry.register(Where())
    return Exposition(registry, address)


def test_the_registry_is_read_on_the_event_loop_one_scrape_at_a_time() -> None:
    async def scrape() -> list[Scrape]:
        async with metrics_server(shown()) as url:
            return await asyncio.gather(*(asyncio.to_thread(Scrape.of, url) for _ in range(4)))

    scrapes = asyncio.run(scrape())
    assert [one.value("reading_thread") for one in scrapes] == [threading.get_ident()] * 4


def test_the_port_is_free_after_the_end() -> None:
    async def show_twice() -> None:
        async with metrics_server(shown("127.0.77.83:0")) as url:  # an address of this test only
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


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "the address must be host:port"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
        ("256.0.0.1:0", "Name or service not known"),
    ],
)
def test_an_impossible_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    async def show() -> None:
        async with metrics_server(shown(address)):
            pass

    with pytest.raises(AddressUnavailable, match=f"cannot show metrics on {address}: {reason}"):
        asyncio.run(show())


def test_more_than_eight_connections_are_rejected_until_one_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = HttpLimits(connections=8, read_seconds=60.0, write_seconds=60.0)  # idle ones stay open
    monkeypatch.setattr("services.runtime.metrics.server._LIMITS", limits)

    async def crowd() -> tuple[list[bytes], Scrape]:
        async with metrics_server(shown()) as url:
            host, _, port = url.split("/")[2].rpartition(":")
            idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(8)]
            refused = [await asyncio.to_thread(_response, host, int(port)) for _ in range(3)]
            for connection in idle:
                connection.close()
            while True:  # until the server has closed them
                with suppress(OSError):  # rejected, perhaps before the end of the request
                    return refused, await asyncio.to_thread(Scrape.of, url)

    refused, scrape = asyncio.run(crowd())
    assert all(response.startswith(b"HTTP/1.1 503 ") for response in refused)
    assert scrape.has("reading_thread")


def _response(host: str, port: int) -> bytes:
    """Connect, send nothing, and return the response."""
    with socket.create_connection((host, port), timeout=60) as connection:
        return connection.makefile("rb").read()


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_other_methods_are_rejected(method: str) -> None:
    async def ask() -> int:
        async with metrics_server(shown()) as url:
            request = urllib.request.Request(url, method=method)
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(urllib.request.urlopen, request, timeout=60)
            caught.value.close()
            return caught.value.code

    assert asyncio.run(ask()) == 405


def test_a_failing_collector_fails_the_scrape_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scrape() -> int:
        exposition = shown()
        exposition.registry.register(Broken())
        async with metrics_server(exposition) as url:
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(Scrape.of, url)
            caught.value.close()
            return caught.value.code

    assert asyncio.run(scrape()) == 500
    assert "no such figure" in caplog.text


def test_a_page_is_written_in_slices_and_equals_the_librarys() -> None:
    registry = CollectorRegistry()
    many = Gauge("many", "So many that they take several slices.", ("number",), registry=registry)
    for number in range(3000):
        many.labels(f'"{number}"\n').set(number / 7)
    registry.register(Odd())
    prepared = []

    async def prepare() -> None:
        prepared.append(len(registry._names_to_collectors))

    async def make() -> tuple[bytes, int]:
        page = MetricsPage(Exposition(registry, "", prepare))
        making = asyncio.create_task(page.text())
        turns = 0
        while not making.done():
            turns += 1
            await asyncio.sleep(0)
        return await making, turns

    text, turns = asyncio.run(make())
    assert text == generate_latest(registry)
    assert turns > 10
    assert len(prepared) == 1
