"""Sends events in a thread of its own, so that nothing that subscribers send holds the event loop.

ZeroMQ enters subscriptions into its trie within the calls that send and receive, as many as there are, for as long as
more arrive. pyzmq releases the interpreter's lock meanwhile. `connections` bounds what may arrive.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import zmq

from services.engine.events.zeromq.sockets import AnySocket

# Of batches on their way to the thread. It is that slow only while subscriptions flood it.
_MOST_WAITING_BYTES = 64 << 20
_READ_SECONDS = 0.2
_CLOSE_SECONDS = 3.0
_SUBSCRIPTIONS_AT_ONCE = 1000


class Sender:
    """Owns an XPUB socket from `start` on. The other methods belong to the event loop."""

    def __init__(self, socket: AnySocket) -> None:
        """The socket may be bound until `start`."""
        # Without it, ZeroMQ would not report that it drops messages.
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket = socket
        self._queue: SimpleQueue[Sequence[bytes] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._linger = 0
        # Each is written by one thread: these by the event loop, the others by the sender's.
        self._accepted_bytes = self._dropped = 0
        self._taken_bytes = self._overflows = 0
        self._next_read = 0.0
        self.subscriptions = 0

    @property
    def overflows(self) -> int:
        """Times that the queue of a subscriber became full, and batches that were dropped before any had them."""
        return self._overflows + self._dropped

    def start(self) -> None:
        """Send from now on."""
        self._thread.start()

    def send(self, frames: Sequence[bytes]) -> None:
        """Pass a message to the thread, without waiting; drop it if 64 MiB wait there."""
        size, waiting = _size(frames), self._accepted_bytes - self._taken_bytes
        if waiting and waiting + size > _MOST_WAITING_BYTES:
            self._dropped += 1
            return
        self._accepted_bytes += size
        self._queue.put(frames)

    async def close(self, linger_seconds: float) -> bool:
        """Send what waits, and close the socket; ZeroMQ then has `linger_seconds` for what has not left.

        Return False if the thread is still busy after some seconds; it closes the socket when it can.
        """
        self._linger = int(linger_seconds * 1000)
        self._queue.put(None)
        if self._thread.ident is None:
            self._thread.start()
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._pass_on():
                self._read()
        finally:
            self._socket.disable_monitor()
            self._socket.close(linger=self._linger)

    def _pass_on(self) -> bool:
        """Send the next message, if there is one soon; return False at the end."""
        with suppress(Empty):
            frames = self._queue.get(timeout=_READ_SECONDS)
            if frames is None:
                return False
            self._publish(frames)
            self._taken_bytes += _size(frames)
        return True

    def _publish(self, frames: Sequence[bytes]) -> None:
        """Pass a message to ZeroMQ, without waiting. It drops it for subscribers whose queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._overflows += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)

    def _read(self) -> None:
        """Count the distinct subscriptions, which ZeroMQ has followed: it passes on the first and the end of each."""
        if (now := time.monotonic()) < self._next_read:
            return
        self._next_read = now + _READ_SECONDS
        with suppress(zmq.Again):
            for _ in range(_SUBSCRIPTIONS_AT_ONCE):
                first = self._socket.recv(zmq.NOBLOCK)[:1]
                self.subscriptions = max(0, self.subscriptions + (first == b"\1") - (first == b"\0"))


def _size(frames: Sequence[bytes]) -> int:
    return sum(map(len, frames))
