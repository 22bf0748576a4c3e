"""Publishes KV events over ZeroMQ, in vLLM's wire format.

Two sockets. One sends each batch to all subscribers as three frames: topic, sequence number (8 bytes, big-endian),
payload (`vllm_format`). At the other one they ask for batches that they missed (`replay`).

A subscriber that does not read costs at most `kv_events_queue` batches: later ones are dropped for it, and it sees that
a number is missing. Nothing here waits for a subscriber. A batch has some 32 KiB at most, unless one block is larger.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from blocks import WindowKind
from services.engine.events.changes import Cleared
from services.engine.events.event_stream import EventBatch, EventStream
from services.engine.events.settings import EventSettings, PublisherStats
from services.engine.events.zeromq.admission import Admission
from services.engine.events.zeromq.curve import CurveServer
from services.engine.events.zeromq.replay import QUEUE, Outcome, Replays, Source, sequence_bytes
from services.engine.events.zeromq.sockets import AnySocket, Connections, listen
from services.engine.events.zeromq.vllm_format import CHUNKED, FULL_ATTENTION, SLIDING_WINDOW, AttentionKind, Encoder
from services.runtime.transport import AddressUnavailable

# At the end, for the last batch to leave the process.
_LINGER_SECONDS = 1.0
_SUBSCRIPTIONS_AT_ONCE = 1000
_UPDATE_SECONDS = 1.0
_LOG_SECONDS = 60.0

log = logging.getLogger("quire.engine")


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
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.XPUB)
        # Without it, ZeroMQ would not tell that it drops messages.
        self.events.setsockopt(zmq.XPUB_NODROP, 1)
        self.replay = zmq.asyncio.Context(self.context).socket(zmq.ROUTER)
        self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.connections = {"events": Connections(self.events), "replay": Connections(self.replay)}
        self._curve = curve
        self._admission = Admission(self.context, self.connections, curve.clients if curve else None)
        self._admission.start()

    def bind(self, settings: EventSettings) -> tuple[str, str]:
        """Listen, and return the addresses; empty: none. Raises AddressUnavailable."""
        first = self._listen(self.events, "events", settings.kv_events_listen, settings.kv_events_queue)
        address = settings.kv_events_replay_listen
        return first, self._listen(self.replay, "replay", address, QUEUE) if address else ""

    def _listen(self, socket: AnySocket, domain: str, address: str, queue: int) -> str:
        setting = "kv_events_listen" if domain == "events" else "kv_events_replay_listen"
        return listen(socket, setting, address, domain=domain, queue=queue, curve=self._curve)

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Pass a message to ZeroMQ, without waiting; return False if a subscriber's queue has become full."""
        try:
            self.events.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.events.setsockopt(zmq.XPUB_NODROP, 0)
            self.events.send_multipart(frames, zmq.NOBLOCK)
            self.events.setsockopt(zmq.XPUB_NODROP, 1)
            return False
        return True

    def refresh(self) -> None:
        """Count connections, and read what subscribers wrote: subscriptions, which ZeroMQ has followed."""
        for connections in self.connections.values():
            connections.update()
        with suppress(zmq.Again):
            for _ in range(_SUBSCRIPTIONS_AT_ONCE):
                self.events.recv(zmq.NOBLOCK)

    async def close(self, linger_seconds: float) -> None:
        """Close both; wait at most `linger_seconds` for events to leave."""
        for connections in self.connections.values():
            connections.close()
        self._admission.stop()
        self.replay.close(linger=0)
        self.events.close(linger=int(linger_seconds * 1000))
        await asyncio.to_thread(self.context.term)


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
        self._overflows = 0
        self.address = self.replay_address = ""

    @property
    def protection(self) -> str:
        """Say who can read the events."""
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
        self._tasks = [asyncio.create_task(self._refresh())]
        if self.replay_address:
            self._tasks.append(asyncio.create_task(self._replays.run(source)))

    def _description(self, stream: EventStream, origin: EventSource) -> bytes:
        """Describe the engine to a subscriber that asked for a snapshot."""
        own = {"epoch": stream.epoch, "next_sequence": stream.next_sequence, "form": self._settings.kv_events_form}
        kinds = [kind._asdict() for kind in origin.kinds()]
        engine = {"block_size": origin.block_size, "engine_id": origin.engine_id, "model": origin.model}
        return msgspec.msgpack.encode({**own, **engine, "kinds": kinds})

    def _send(self, batch: EventBatch) -> None:
        if self._encoder and self._sockets:
            frames = (self._topic, sequence_bytes(batch.sequence), self._encoder.encode(batch))
            self._overflows += not self._sockets.publish(frames)

    async def _refresh(self) -> None:
        logged, at = 0, -inf
        while self._sockets:
            self._sockets.refresh()
            refused = sum(one.refused for one in self._sockets.connections.values())
            if refused > logged and time.monotonic() - at >= _LOG_SECONDS:
                log.warning("refused %d connections to KV events: wrong key or protocol, or too many", refused - logged)
                logged, at = refused, time.monotonic()
            await asyncio.sleep(_UPDATE_SECONDS)

    @property
    def stats(self) -> PublisherStats:
        """What was sent, and to whom; connections as of now."""
        if self._sockets:
            self._sockets.refresh()
        connections = self._sockets.connections if self._sockets else {}
        outcomes = self._replays.outcomes if self._replays else Counter[Outcome]()
        return PublisherStats(
            self._overflows,
            {name: one.count for name, one in connections.items()},
            {name: one.refused for name, one in connections.items()},
            {outcome.value: outcomes[outcome] for outcome in Outcome},
            self._replays.batches if self._replays else 0,
        )

    async def finish(self, stream: EventStream) -> None:
        """At a planned end: tell subscribers that no block is left, and give the message a second to leave."""
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
