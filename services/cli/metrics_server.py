"""Shows a process's metrics to Prometheus, over HTTP on a port of their own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from services.transport import AddressUnavailable

_SNAPSHOT_SECONDS = 5.0


@asynccontextmanager
async def metrics_server(address: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve a registry over HTTP, and give the URL. Raises AddressUnavailable.

    Requests are answered on threads of their own, but the registry is read on the running event loop: what its
    collectors look at has one owner, and one scrape sees one moment.
    """
    host, _, port = address.rpartition(":")
    on_loop = CollectorRegistry(support_collectors_without_names=True)
    on_loop.register(_OnEventLoop(registry))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), on_loop)
    except (ValueError, OverflowError) as error:
        raise AddressUnavailable(f"cannot show metrics on {address}: it is not host:port") from error
    except OSError as error:
        raise AddressUnavailable(f"cannot show metrics on {address}: {error.strerror}") from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        with suppress(OSError):  # Linux wakes the thread by it; elsewhere that looks every half second whether to end
            server.socket.shutdown(socket.SHUT_RDWR)
        # On a thread, because the request that it waits for may itself be waiting for the event loop.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _OnEventLoop(Collector):
    """Reads a registry on the event loop that made this."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._loop = asyncio.get_running_loop()

    def describe(self) -> Iterable[Metric]:
        """Say nothing: the registry behind this knows its names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics of one moment. Raises TimeoutError when the event loop does not answer."""
        return asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result(_SNAPSHOT_SECONDS)

    async def _snapshot(self) -> list[Metric]:
        return list(self._registry.collect())
