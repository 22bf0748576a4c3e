"""An engine's KV events on loopback, without the engine, and what subscribers do with the sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from services.engine.events.event_stream import EventStream
from services.engine.events.zeromq.listener import EventListener, Publication
from services.engine.events.zeromq.publisher import EventPublisher, EventSource
from services.engine.events.zeromq.replay import sequence_bytes
from services.engine.settings import EngineSettings
from tests.key_changes import BLOCK_SIZE, Keys

ANY = "127.0.0.1:0"
EPOCH = 1 << 50
SECONDS = 20.0


class Published:
    """A stream, its keys, and the sockets at which it is published."""

    def __init__(self, epoch: int = EPOCH, seed: int = 0, **settings: Any) -> None:
        values = {"kv_events_listen": ANY, "kv_events_replay_listen": ANY} | settings
        self.settings = EngineSettings(**values)
        self.stream = EventStream(epoch, lambda: 1.0, self.settings.kv_events_history)
        self.keys = Keys(self.stream, seed)
        self.publisher = EventPublisher(self.settings)

    @property
    def publication(self) -> Publication:
        return Publication(self.publisher.address, self.publisher.replay_address)

    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.publisher.stats.requests.items() if count}


@asynccontextmanager
async def published(*arguments: Any, **settings: Any) -> AsyncIterator[Published]:
    one = Published(*arguments, **settings)
    await one.publisher.bind()
    one.publisher.begin(one.stream, EventSource("engine-1", "tiny", BLOCK_SIZE, one.keys.windows))
    try:
        yield one
    finally:
        await one.publisher.close()


@asynccontextmanager
async def listening(publication: Publication, **options: Any) -> AsyncIterator[EventListener]:
    listener = EventListener(publication, **options)
    task = asyncio.create_task(listener.run())
    try:
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def dealing(one: Published, **options: int) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that is connected to the address of replays."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(f"tcp://{one.publisher.replay_address}")
        yield socket


async def ask(socket: zmq.asyncio.Socket, first: int, *words: bytes) -> list[list[bytes]]:
    """Ask for a replay; return the messages before its end."""
    await socket.send_multipart((b"", sequence_bytes(first), *words))
    found: list[list[bytes]] = []
    while True:
        message = await asyncio.wait_for(socket.recv_multipart(), SECONDS)
        if message[-1] == b"":
            assert message == [b"", b"", b"\xff" * 8, b""]
            return found
        found.append(message)


async def settle(one: Published, listener: EventListener) -> None:
    """Publish heartbeats until the listener has applied the last one."""
    async with asyncio.timeout(SECONDS):
        while listener.follower.expected != one.stream.next_sequence:
            one.stream.publish([])
            await asyncio.sleep(0.02)


async def until(holds: Callable[[], object], pause: float = 0.01) -> None:
    """Wait until something that no event tells holds."""
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(pause)
