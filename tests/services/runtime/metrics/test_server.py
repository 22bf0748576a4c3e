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
from services.runtime.service import Readiness
from services.runtime.transport import AddressUnavailable
from tests.scrape import Scrape

pytestmark = pytest.mark.anyio


class ReadingThread(Collector):
    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("reading_thread", "Identity.", value=threading.get_ident())


class Broken(Collector):
    def collect(self) -> Iterable[Metric]:
        raise OSError("no such figure")


class Odd(Collector):
    """Each type of metric, with texts and values that need escaping."""

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
        yield InfoMetricFamily("info", "Versions.", {"version": "1"})


def shown(address: str = "127.0.0.1:0") -> Exposition:
    registry = CollectorRegistry()
    registry.register(ReadingThread())
    return Exposition(registry, address)


async def status_of(url: str, method: str = "GET") -> int:
    """Return the status of a request that fails."""
    request = urllib.request.Request(url, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=60)
    caught.value.close()
    return caught.value.code


async def test_the_registry_is_read_on_the_event_loop_one_scrape_at_a_time() -> None:
    async with metrics_server(shown(), Readiness()) as url:
        scrapes = await asyncio.gather(*(asyncio.to_thread(Scrape.of, url) for _ in range(4)))
    assert [one.value("reading_thread") for one in scrapes] == [threading.get_ident()] * 4


async def test_the_port_is_free_after_the_end() -> None:
    async with metrics_server(shown("127.0.77.83:0"), Readiness()) as url:  # an address of this test only
        pass
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(Scrape.of, url)
    async with metrics_server(shown(url.split("/")[2]), Readiness()) as again:
        assert again == url


async def test_an_address_in_use_is_refused() -> None:
    async with metrics_server(shown(), Readiness()) as url:
        with pytest.raises(AddressUnavailable, match="Address already in use"):
            async with metrics_server(shown(url.split("/")[2]), Readiness()):
                pass


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "the address must be host:port"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
        ("256.0.0.1:0", "Name or service not known"),
    ],
)
async def test_an_impossible_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(AddressUnavailable, match=f"cannot show metrics on {address}: {reason}"):
        async with metrics_server(shown(address), Readiness()):
            pass


async def test_more_than_eight_connections_are_rejected_until_one_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = HttpLimits(connections=8, read_seconds=60.0, write_seconds=60.0)  # idle ones stay open
    monkeypatch.setattr("services.runtime.metrics.server._LIMITS", limits)
    async with metrics_server(shown(), Readiness()) as url:
        host, _, port = url.split("/")[2].rpartition(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(8)]
        for _ in range(3):
            assert (await asyncio.to_thread(response_without_request, host, int(port))).startswith(b"HTTP/1.1 503 ")
        for connection in idle:
            connection.close()
        scrape = None
        while scrape is None:  # until the server has closed them
            with suppress(OSError):  # rejected, perhaps before the end of the request
                scrape = await asyncio.to_thread(Scrape.of, url)
    assert scrape.has("reading_thread")


def response_without_request(host: str, port: int) -> bytes:
    with socket.create_connection((host, port), timeout=60) as connection:
        return connection.makefile("rb").read()


async def test_readiness_is_answered_without_reading_metrics() -> None:
    registry, readiness = CollectorRegistry(), Readiness()
    registry.register(Broken())
    async with metrics_server(Exposition(registry, "127.0.0.1:0"), readiness) as url:
        place = url.replace("/metrics", "/ready")
        assert await status_of(place) == 503
        readiness.set(True)
        with await asyncio.to_thread(urllib.request.urlopen, place, timeout=60) as answer:
            assert answer.read() == b"ready\n"
        readiness.notes = ["slow: no\nmemory"]
        with await asyncio.to_thread(urllib.request.urlopen, place, timeout=60) as answer:
            assert answer.read() == b"ready\nslow: no memory\n"
        readiness.retire()
        assert await status_of(place) == 503
        alive = place.replace("/ready", "/live")
        with await asyncio.to_thread(urllib.request.urlopen, alive, timeout=60) as answer:
            assert answer.read() == b"live\n"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_other_methods_are_rejected(method: str) -> None:
    async with metrics_server(shown(), Readiness()) as url:
        assert await status_of(url, method) == 405


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/v1/models"])
async def test_other_paths_are_not_found(path: str) -> None:
    async with metrics_server(shown(), Readiness()) as url:
        assert await status_of(url.replace("/metrics", path)) == 404


async def test_a_failing_collector_fails_the_scrape_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    exposition = shown()
    exposition.registry.register(Broken())
    async with metrics_server(exposition, Readiness()) as url:
        assert await status_of(url) == 500
    assert "no such figure" in caplog.text


async def test_a_page_is_written_in_slices_and_equals_the_librarys() -> None:
    registry = CollectorRegistry()
    many = Gauge("many", "So many that they take several slices.", ("number",), registry=registry)
    for number in range(3000):
        many.labels(f'"{number}"\n').set(number / 7)
    registry.register(Odd())
    prepared, turns = [], 0

    async def prepare() -> None:
        prepared.append(len(registry._names_to_collectors))

    writing = asyncio.create_task(MetricsPage(Exposition(registry, "", prepare)).text())
    while not writing.done():
        turns += 1
        await asyncio.sleep(0)
    assert await writing == generate_latest(registry)
    assert turns > 10
    assert len(prepared) == 1
