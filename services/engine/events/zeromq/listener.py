"""Follows the KV events of an engine, ours or vLLM's, over ZeroMQ.

It subscribes, asks for a snapshot, applies each batch, and asks for those that are missing. An engine that restarted
has higher numbers, which are a gap, and the answer is a snapshot of the new process. Where the numbers of a process
begin at 0, as vLLM's do, it has lower ones, or by the time of the next connection the same: so behind a lost connection
the whole state is asked for. Without an address for replays it applies what it receives, and counts what it missed.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from services.engine.events.zeromq.curve import CurveKeys
from services.engine.events.zeromq.follower import Follower
from services.engine.events.zeromq.replay import END, SNAPSHOT, sequence_bytes
from services.engine.events.zeromq.sockets import ConnectionWatch
from services.engine.events.zeromq.vllm_format import AttentionKind, InvalidBatch, WireEvent, decode

_REPLAY_SECONDS = 10.0
# vLLM's publisher ignores a request for a snapshot.
_SNAPSHOT_SECONDS = 3.0
_RECEIVE_QUEUE = 10_000
_MOST_BYTES = 64 << 20
_RECONNECT_MILLISECONDS = 2000


class Description(msgspec.Struct):
    """What an engine says of itself before a snapshot that was asked for."""

    epoch: int
    next_sequence: int
    block_size: int
    engine_id: str
    model: str
    form: str
    kinds: list[AttentionKind | dict[str, str | int | None]]


class Publication(NamedTuple):
    """Where an engine's events are: addresses as host:port, the topic's beginning, and keys of CURVE.

    `replay` may be empty. `keys` are the listener's own, `server` is the engine's public key; None: no encryption.
    """

    events: str
    replay: str = ""
    topic: str = ""
    keys: CurveKeys | None = None
    server: bytes | None = None


# Receives the number and the events of each batch that was applied.
OnBatch = Callable[[int, Sequence[WireEvent]], None]


class EventListener:
    """Keeps the blocks of one engine. `follower` has them; `description` is what the engine said of itself.

    `has_received`: a message has come.
    """

    def __init__(self, publication: Publication, on_batch: OnBatch = lambda _sequence, _events: None) -> None:
        self.follower = Follower()
        self.description: Description | None = None
        self.replays = 0
        self.invalid = 0
        self.complete = asyncio.Event()
        self.has_received = False
        self._watch: ConnectionWatch | None = None
        self._publication = publication
        self._on_batch = on_batch

    @property
    def is_connected(self) -> bool:
        """Whether the address of events is connected. Only while it follows."""
        return self._watch is not None and self._watch.is_connected

    async def run(self) -> None:
        """Follow until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.rcvhwm = _RECEIVE_QUEUE
            socket.subscribe(self._publication.topic)
            with closing(ConnectionWatch(socket)) as watch:
                self._watch = watch
                self._connect(socket, self._publication.events)
                try:
                    await self._follow(context, socket, watch)
                finally:
                    self._watch = None

    async def _follow(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, watch: ConnectionWatch) -> None:
        if self._publication.replay:
            await self._begin(context)
        watch.take_loss()  # before it
        while True:
            frames = await socket.recv_multipart()
            if watch.take_loss() and self._numbers_repeat():
                self.follower.restart()
            await self._receive(context, frames)

    def _numbers_repeat(self) -> bool:
        """Whether another process of the engine may use the same numbers, and its state can be asked for."""
        return bool(self._publication.replay) and not (self.description and self.description.epoch)

    async def _begin(self, context: zmq.asyncio.Context) -> bool:
        """Get the whole state: as a snapshot, or from a publisher that has none, what it kept."""
        return await self._replay(context, 0, _SNAPSHOT_SECONDS, SNAPSHOT) or await self._replay(
            context, 0, _REPLAY_SECONDS
        )

    async def _receive(self, context: zmq.asyncio.Context, frames: Sequence[bytes]) -> None:
        self.has_received = True
        if len(frames) != 3:
            self.invalid += 1
            return
        sequence = int.from_bytes(frames[1], "big")
        first = self.follower.missing(sequence)
        if first is not None and self._publication.replay:
            self.complete.clear()
            if not await self._resume(context, first):
                return  # the next batch asks again
        self._apply(sequence, frames[2])

    async def _resume(self, context: zmq.asyncio.Context, first: int) -> bool:
        if not first and self.description:  # a publisher that answers the word fills no numbers
            return await self._begin(context)
        return await self._replay(context, first, _REPLAY_SECONDS)

    async def _replay(self, context: zmq.asyncio.Context, first: int, seconds: float, *words: bytes) -> bool:
        """Apply the batches from a number on; return False if the answer had no end."""
        self.replays += 1
        with context.socket(zmq.DEALER) as socket:  # a new one, so that no answer to an earlier request arrives
            self._connect(socket, self._publication.replay)
            await socket.send_multipart((b"", sequence_bytes(first), *words))
            try:
                while frames := await asyncio.wait_for(socket.recv_multipart(), seconds):
                    seconds = _REPLAY_SECONDS
                    if self._take(frames[1:]):
                        self.complete.set()
                        return True
            except TimeoutError:  # what came may be half a snapshot
                self.follower.restart()
        return False

    def _take(self, frames: Sequence[bytes]) -> bool:
        """Take a message of an answer; return True at its end."""
        self.has_received = True
        if len(frames) != 3:
            self.invalid += 1
            return False
        _, sequence, payload = frames
        if not payload and sequence == END:
            return True
        if not self._describes(payload):
            self._apply(int.from_bytes(sequence, "big"), payload, replayed=True)
        return False

    def _describes(self, payload: bytes) -> bool:
        """Whether a message is the description before a snapshot: a map, where a batch is an array."""
        try:
            self.description = msgspec.msgpack.decode(payload, type=Description)
        except msgspec.MsgspecError:
            return False
        return True

    def _apply(self, sequence: int, payload: bytes, *, replayed: bool = False) -> None:
        try:
            events = decode(payload)
        except InvalidBatch:
            self.invalid += 1
            return
        if self.follower.apply(sequence, events, replayed=replayed):
            self._on_batch(sequence, events)

    def _connect(self, socket: zmq.asyncio.Socket, address: str) -> None:
        publication = self._publication
        socket.linger = 0
        socket.maxmsgsize = _MOST_BYTES
        socket.ipv6 = True
        socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS
        if publication.keys and publication.server:
            socket.curve_publickey, socket.curve_secretkey = publication.keys
            socket.curve_serverkey = publication.server
        socket.connect(f"tcp://{address}")
