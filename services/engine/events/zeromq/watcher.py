"""Watches the sockets of KV events in a thread of its own: their connections, what these send, and whose they are."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf

import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio

from services.engine.events.zeromq.connections import Connections
from services.engine.events.zeromq.curve import CurveServer

MOST_SUBSCRIPTIONS = 1000
"""Distinct ones, of all subscribers. Each one that follows everything has the same."""

# Between two looks at what arrived: after an accepted connection or arriving bytes for some time, and otherwise.
_BUSY_SECONDS, _CALM_SECONDS = 0.05, 0.2
_BUSY_FOR_SECONDS = 2.0
# After the end of a connection, for its subscriptions to go.
_CALM_TICKS = 20
_LOG_SECONDS = 60.0

log = logging.getLogger("quire.engine")


class Watcher:
    """Follows the connections of a context's sockets, by ZAP domain, and ends those that send too much."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        connections: Mapping[str, Connections],
        curve: CurveServer | None,
        subscriptions: Callable[[], int],
    ) -> None:
        """`subscriptions` returns the number of distinct ones, those at the socket `events`."""
        self._context = context
        self._connections = connections
        self._curve = curve
        self._subscriptions = subscriptions
        self._calm = 0
        self._logged, self._logged_at = (0, 0), -inf
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kv-events-watcher", daemon=True)

    def start(self) -> None:
        """Watch from now on; before a socket is bound, because with CURVE each connection asks here."""
        self._thread.start()
        self._ready.wait()

    async def stop(self) -> None:
        """Watch no more; after the sockets' monitors were disabled."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._watch())
        admission = self._admission()
        self._ready.set()
        await asyncio.wait([self._task])
        if admission:
            admission.stop()
        if not self._task.cancelled() and (error := self._task.exception()):
            log.error("KV events: connections are no longer watched", exc_info=error)

    def _admission(self) -> zmq.auth.asyncio.AsyncioAuthenticator | None:
        """Start to answer about the keys of connections (ZAP, ZeroMQ's RFC 27), if there are any."""
        if self._curve is None:
            return None
        admission = zmq.auth.asyncio.AsyncioAuthenticator(self._context, log=logging.getLogger("quire.zap"))
        for domain in self._connections:
            if self._curve.clients:
                admission.configure_curve_callback(domain, self._curve.clients)
            else:
                admission.configure_curve(domain, zmq.auth.CURVE_ALLOW_ANY)
        admission.start()
        return admission

    async def _watch(self) -> None:
        context: zmq.asyncio.Context = zmq.asyncio.Context(self._context)
        async with asyncio.TaskGroup() as tasks:
            accepted = asyncio.Event()
            for connections in self._connections.values():
                tasks.create_task(connections.watch(context, accepted.set))
            tasks.create_task(self._limit(accepted))

    async def _limit(self, accepted: asyncio.Event) -> None:
        at = busy_until = time.monotonic()
        while True:
            if at < busy_until:
                await asyncio.sleep(_BUSY_SECONDS)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(accepted.wait(), _CALM_SECONDS)
            before, at = at, time.monotonic()
            received = [one.limit(at - before) for one in self._connections.values()]
            if any(received) or accepted.is_set():
                busy_until = at + _BUSY_FOR_SECONDS
            accepted.clear()
            self._limit_subscriptions()
            self._log()

    def _limit_subscriptions(self) -> None:
        self._calm = max(0, self._calm - 1)
        if self._subscriptions() > MOST_SUBSCRIPTIONS and not self._calm:
            self._connections["events"].end_largest()
            self._calm = _CALM_TICKS

    def _log(self) -> None:
        """Say what was refused and ended since the last time, once a minute at most."""
        now, every = time.monotonic(), self._connections.values()
        refused, ended = found = sum(one.refused for one in every), sum(one.ended for one in every)
        if found == self._logged or now - self._logged_at < _LOG_SECONDS:
            return
        before = self._logged
        self._logged, self._logged_at = found, now
        if refused > before[0]:
            log.warning("refused %d connections to KV events: wrong key or protocol, or too many", refused - before[0])
        if ended > before[1]:
            log.warning("closed %d connections to KV events that sent more than a subscriber does", ended - before[1])
