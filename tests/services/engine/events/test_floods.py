"""Peers that send as much as they can: subscriptions, requests, parts of a message, and connections."""

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import psutil
import pytest
import zmq

from services.engine.events.zeromq import connections, watcher
from services.engine.events.zeromq.connections import MOST_CONNECTIONS
from services.engine.events.zeromq.sender import Sender
from tests.services.engine.events.publication import EPOCH, Published, ask, dealing, listening, published, settle, until

pytestmark = pytest.mark.anyio

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP 3 (ZeroMQ's RFC 23)."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


def dial(address: str, kind: bytes) -> socket.socket:
    """Return a connection after its handshake."""
    host, _, port = address.rpartition(":")
    dialled = socket.create_connection((host, int(port)))
    dialled.settimeout(5)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    dialled.sendall(_GREETING + frame(ready, _COMMAND))
    received = b""
    while len(received) < len(_GREETING) + 2:
        received += dialled.recv(4096) or pytest.fail("the handshake was refused")
    return dialled


@contextmanager
def flood(address: str, kind: bytes, parts: Iterator[bytes]) -> Iterator[None]:
    """Send parts from a thread, until they or the connection end."""
    dialled = dial(address, kind)

    def send() -> None:
        with suppress(OSError):
            for part in parts:
                dialled.sendall(part)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        with dialled, suppress(OSError):
            dialled.shutdown(socket.SHUT_RDWR)
        thread.join()


@asynccontextmanager
async def brief_delays(most_seconds: float) -> AsyncIterator[None]:
    """Fail if the event loop is held for longer at once."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - begun)

    beating = asyncio.create_task(beat())
    yield
    beating.cancel()
    assert longest < most_seconds


def subscriptions(count: int) -> Iterator[bytes]:
    """Yield distinct ones of 400 bytes, 100 at a time."""
    for _ in range(count // 100):
        yield b"".join(frame(b"\1" + os.urandom(8).hex().encode() + b"s" * 383) for _ in range(100))


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def ended(one: Published, domain: str) -> Callable[[], bool]:
    return lambda: one.publisher.stats.ended[domain] >= 1


async def test_a_flood_of_subscriptions_holds_no_follower_and_no_event_loop() -> None:
    async with published() as one, listening(one.publication) as listener:
        await until(listener.complete.is_set)
        before = rss()
        async with brief_delays(0.5):
            with flood(one.publisher.address, b"XSUB", subscriptions(5000)):
                for _ in range(200):
                    one.keys.change()
                    await asyncio.sleep(0.001)
                await until(ended(one, "events"))
            await settle(one, listener)
        assert listener.follower.held.counts() == one.keys.counts()
        assert listener.follower.lost == 0
        assert rss() - before < 64 << 20
        await until(lambda: one.publisher.stats.connections["events"] == 1)


@pytest.mark.parametrize(
    "part",
    [frame(b"x" * 100) * 500, frame(b"", _MORE) * 4000, (frame(b"", _MORE) + frame(bytes(8), _MORE)) * 500],
    ids=["malformed", "parts without end", "longer parts without end"],
)
async def test_a_flood_at_the_replay_socket_holds_no_replay(part: bytes) -> None:
    async with published() as one, dealing(one) as normal:
        for _ in range(200):
            one.keys.change()
        before = rss()
        async with brief_delays(0.5):
            with flood(one.publisher.replay_address, b"DEALER", iter([part] * 1000)):
                assert len(await ask(normal, EPOCH)) == one.stream.next_sequence - EPOCH
                await until(ended(one, "replay"))
                await until(lambda: one.publisher.stats.connections["replay"] == 1)
        assert rss() - before < 64 << 20


async def test_the_largest_connection_ends_when_there_are_too_many_subscriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "MOST_SUBSCRIPTIONS", 10)
    async with published() as one, listening(one.publication) as listener:
        await until(listener.complete.is_set)
        with dial(one.publisher.address, b"SUB") as dialled:
            dialled.sendall(b"".join(frame(b"\1" + bytes([number])) for number in range(20)))
            await until(ended(one, "events"))
            await until(lambda: one.publisher.stats.connections["events"] == 1)
        one.keys.grow(3)
        replays = listener.replays
        await settle(one, listener)
        assert (listener.replays, one.publisher.stats.ended["events"]) == (replays, 1), "the listener's stands"


async def test_idle_connections_have_bounded_descriptors_and_are_refused() -> None:
    async with published() as one:
        process = psutil.Process()
        host, _, port = one.publisher.address.rpartition(":")
        before, most, begun = process.num_fds(), 0, time.perf_counter()
        with ExitStack() as stack:
            for number in range(300):
                dialled = stack.enter_context(socket.create_connection((host, int(port)), 10))
                most = max(most, process.num_fds() - before - number - 1)
                assert dialled
                await asyncio.sleep(0)
            await until(lambda: one.publisher.stats.refused["events"] == 300 - MOST_CONNECTIONS)
            assert one.publisher.stats.connections["events"] == MOST_CONNECTIONS
            assert most < 2 * MOST_CONNECTIONS
            assert time.perf_counter() - begun < 10.0
            await until(lambda: one.publisher.stats.connections["events"] == 0)  # after 5 s without a handshake
        async with listening(one.publication) as listener:
            await until(listener.complete.is_set)


async def test_a_connection_may_go_on_to_send_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_BURST_BYTES", 400)
    async with published() as one, dealing(one) as socket:
        for _ in range(30):  # some 1,000 bytes
            await ask(socket, EPOCH)
            await asyncio.sleep(0.05)
        assert one.publisher.stats.ended["replay"] == 0


def test_batches_that_a_busy_sender_does_not_take_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.events.zeromq.sender._MOST_WAITING_BYTES", 100)
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        sender = Sender(socket)  # it never starts
        for _ in range(5):
            sender.send((b"", b"x" * 40))
        assert sender.overflows == 3
        socket.linger = 0
