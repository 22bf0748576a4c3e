"""Publishes KV events over ZeroMQ, in vLLM's wire format.

Two sockets. One sends each batch to all subscribers as three frames: topic, sequence number (8 bytes, big-endian),
payload (`vllm_format`). At the other one they ask for batches that they missed (`replay`).

A subscriber that does not read costs at most `kv_events_queue` batches: later ones are dropped for it, and it sees that
a number is missing. Nothing here waits for a subscriber. A batch has some 32 KiB at most, unless one block is larger.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from blocks import WindowKind
from services.engine.events.changes import Cleared
from services.engine.events.event_stream import EventBatch, EventStream
from services.engine.events.settings import EventSettings, PublisherStats
from services.engine.events.zeromq.connections import Connections
from services.engine.events.zeromq.curve import CurveServer
from services.engine.events.zeromq.replay import QUEUE, Outcome, Replays, Source, sequence_bytes
from services.engine.events.zeromq.sender import Sender
from services.engine.events.zeromq.sockets import AnySocket, listen
from services.engine.events.zeromq.vllm_format import CHUNKED, FULL_ATTENTION, SLIDING_WINDOW, AttentionKind, Encoder
from services.engine.events.zeromq.watcher import Watcher
from services.runtime.transport import AddressUnavailable

# At the end, for the last batch to leave the process.
_LINGER_SECONDS = 1.0


class EventSource(NamedTuple):
    """The engine of events: its id, its model's name for clients, tokens of a block, and its kinds with a window."""

    engine_id: str
    model: str
    block_size: int
    windows: Sequence[WindowKind] = ()

    def kinds(self) -> list[AttentionKind]:
        """Return the kinds by number."""
        return [AttentionKind(FULL_ATTENTION), *map(_attention, self.windows)]


class _Sockets:
    """The two sockets, of one context: for events, and for replays if they have an address."""

    def __init__(self, curve: CurveServer | None) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)
        self.sender = Sender(self._events)
        self.replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
        self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sockets: dict[str, AnySocket] = {"events": self._events, "replay": self.replay}
        self.connections = {domain: Connections(socket, domain) for domain, socket in sockets.items()}
        self._curve = curve
        self._watcher = Watcher(self._context, self.connections, curve, lambda: self.sender.subscriptions)
        self._watcher.start()

    def bind(self, settings: EventSettings) -> tuple[str, str]:
        """Listen, and return the addresses; empty: none. Raises AddressUnavailable."""
        longest = len(settings.kv_events_topic.encode())
        first = self._listen(self._events, "events", settings.kv_events_listen, settings.kv_events_queue, longest)
        address = settings.kv_events_replay_listen
        second = self._listen(self.replay, "replay", address, QUEUE) if address else ""
        self.sender.start()
        return first, second

    def _listen(self, socket: AnySocket, domain: str, address: str, queue: int, longest: int = 0) -> str:
        setting = "kv_events_listen" if domain == "events" else "kv_events_replay_listen"
        bound = listen(socket, setting, address, domain=domain, queue=queue, curve=self._curve, longest=longest)
        self.connections[domain].port = int(bound.rpartition(":")[2])
        return bound

    async def close(self, linger_seconds: float) -> None:
        """Close both; wait at most `linger_seconds` for events to leave.

        A flood of subscriptions may occupy the sender for longer than it is waited for: its thread then ends with the
        process.
        """
        for connections in self.connections.values():
            connections.admit_no_more()
        if not await self.sender.close(linger_seconds):
            self.replay.close(linger=0)
            return
        self.replay.disable_monitor()
        await self._watcher.stop()
        self.replay.close(linger=0)
        await asyncio.to_thread(self._context.term)


class EventPublisher:
    """Publishes the events of one engine: listens after `bind`, and has events from `begin` on."""

    def __init__(self, settings: EventSettings) -> None:
        """Read the keys. Raises InvalidSetting."""
        self._settings = settings
        self._topic = settings.kv_events_topic.encode()
        files = settings.kv_events_curve_key, settings.kv_events_curve_clients
        self._curve = CurveServer(*files) if settings.kv_events_curve_key else None
        self._sockets: _Sockets | None = None
        self._replays: Replays | None = None
        self._encoder: Encoder | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.address = self.replay_address = ""

    @property
    def protection(self) -> str:
        """Who can read the events, in words for the log."""
        if self._curve is None:
            return "in plain text, for whoever connects"
        return "encrypted, " + ("for the clients of a file" if self._curve.clients else "for whoever connects")

    async def bind(self) -> None:
        """Listen. Raises AddressUnavailable, with the name of the setting."""
        self._sockets = _Sockets(self._curve)
        try:
            self.address, self.replay_address = self._sockets.bind(self._settings)
        except AddressUnavailable:
            await self.close()
            raise
        self._replays = Replays(self._sockets.replay, self._topic)

    def begin(self, stream: EventStream, origin: EventSource) -> None:
        """Publish the batches of a stream from now on, and answer requests for those before. After `bind`."""
        assert self._replays is not None, "the sockets are bound"
        encoder = Encoder(origin.block_size, origin.kinds(), arrays=self._settings.kv_events_form == "array")
        self._encoder = encoder
        stream.listen(self._send)
        source = Source(stream, encoder.encode, lambda: self._description(stream, origin))
        if self.replay_address:
            self._tasks = [asyncio.create_task(self._replays.run(source))]

    def _description(self, stream: EventStream, origin: EventSource) -> bytes:
        """Describe the engine to a subscriber that asked for a snapshot."""
        own = {"epoch": stream.epoch, "next_sequence": stream.next_sequence, "form": self._settings.kv_events_form}
        kinds = [kind._asdict() for kind in origin.kinds()]
        engine = {"block_size": origin.block_size, "engine_id": origin.engine_id, "model": origin.model}
        return msgspec.msgpack.encode({**own, **engine, "kinds": kinds})

    def _send(self, batch: EventBatch) -> None:
        if self._encoder and self._sockets:
            frames = (self._topic, sequence_bytes(batch.sequence), self._encoder.encode(batch))
            self._sockets.sender.send(frames)

    @property
    def stats(self) -> PublisherStats:
        """What was sent, and to whom; connections as of now."""
        connections = self._sockets.connections if self._sockets else {}
        outcomes = self._replays.outcomes if self._replays else Counter[Outcome]()
        return PublisherStats(
            self._sockets.sender.overflows if self._sockets else 0,
            {name: one.count for name, one in connections.items()},
            {name: one.refused for name, one in connections.items()},
            {name: one.ended for name, one in connections.items()},
            {outcome.value: outcomes[outcome] for outcome in Outcome},
            self._replays.batches if self._replays else 0,
        )

    async def finish(self, stream: EventStream) -> None:
        """At a planned end: publish that no block is left, and give the message a second to leave."""
        if self._encoder:
            stream.publish([Cleared()])
        await self.close(_LINGER_SECONDS)

    async def close(self, linger_seconds: float = 0.0) -> None:
        """Close the sockets; wait at most `linger_seconds` for messages to leave."""
        sockets, self._sockets, self._encoder = self._sockets, None, None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if sockets:
            await sockets.close(linger_seconds)


def _attention(kind: WindowKind) -> AttentionKind:
    return AttentionKind(CHUNKED) if kind.chunked else AttentionKind(SLIDING_WINDOW, kind.tokens)
