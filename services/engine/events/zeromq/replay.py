"""Answers subscribers that missed batches: with these, or with a snapshot.

Requests and answers are vLLM's (`distributed/kv_events.py`, 0.32), on a ROUTER socket:

* Request: an empty frame, and the first sequence number that is wanted (8 bytes, big-endian).
* Answer: for each batch an empty frame, topic, sequence number (8 bytes), payload; at the end an empty frame, an empty
  one, 8 bytes of 0xFF, an empty one.

If a batch that is wanted is not kept any more, or is of an earlier process, vLLM answers with what is left. Here the
answer is a snapshot: batches of the same form that begin with AllBlocksCleared, whose numbers rise from the wanted one
to the last before the snapshot began (`snapshots`), then the batches since, then the end. A subscriber that applies the
batches in order has the state of the engine, whether or not it supports snapshots. Where numbers begin at 0, batches
without changes fill the numbers between the state and the last one; if there are more than 262,144 numbers, the first
one is higher than the wanted one.

Beyond vLLM, a request with a third frame, the word `snapshot`, is always answered with a snapshot, after one message of
four frames: empty, topic, the epoch (8 bytes), and a msgpack map with `epoch`, `next_sequence`, `block_size`,
`engine_id`, `model`, `form` (`map` or `array`) and `kinds`, a list of maps with `name` and `window`. vLLM's publisher
ignores such a request.

Answers are given one at a time. ZeroMQ never says when a peer reads again, so an answer to a slow one is tried again
after 0.5 ms, later after 10 ms; without progress for some seconds it is given up, without its end, and the peer asks
again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import zmq
import zmq.asyncio

from services.engine.events.event_stream import EventBatch, EventStream
from services.engine.events.zeromq.snapshots import SnapshotOutgrown, consecutive, make_room, snapshot

SNAPSHOT = b"snapshot"
END = b"\xff" * 8
SEQUENCE_BYTES = 8
# Messages that wait for a peer: 2 MiB of batches.
QUEUE = 64
_MOST_WAITING = 16
# Of requests that are read; a message that is there is received without a pause.
_MESSAGES_AT_ONCE = 32
_PAUSE_SECONDS = 0.01
_FIRST_RETRY_SECONDS = 0.0005
_RETRY_SECONDS = 0.01
# Batches without changes that are sent without a pause: about half a millisecond.
_FILLED_AT_ONCE = 32
_STALLED_SECONDS = 5.0
_ANSWER_SECONDS = 120.0

log = logging.getLogger("quire.engine")


class Outcome(Enum):
    """How a request for a replay ended."""

    REPLAYED = "replayed"  # with the wanted batches
    SNAPSHOT = "snapshot"  # with a snapshot
    MALFORMED = "malformed"  # it is no request, and was ignored
    QUEUE_FULL = "queue_full"  # too many others wait, and it was ignored
    STALLED = "stalled"  # the peer did not read, or is gone
    OVERTAKEN = "overtaken"  # events came faster than the peer read


class ReplayRequest(NamedTuple):
    """Whose request it is, the first sequence number that is wanted, and whether a snapshot is wanted in any case."""

    peer: bytes
    first: int
    wants_snapshot: bool = False


class _Stalled(Exception):
    """A peer did not read in time, or is gone."""


class _Overtaken(Exception):
    """A batch that the peer needs is not kept any more."""


class Source(NamedTuple):
    """The stream of an engine, how a batch is encoded, and `description`: what an asked snapshot begins with."""

    stream: EventStream
    encode: Callable[[EventBatch], bytes]
    description: Callable[[], bytes]


class Replays:
    """Answers the requests of a ROUTER socket, on the event loop, without ever waiting in a send."""

    def __init__(self, socket: zmq.asyncio.Socket, topic: bytes, stalled_seconds: float = _STALLED_SECONDS) -> None:
        """Answers of a peer that reads nothing for `stalled_seconds` are given up."""
        self._socket = socket
        self._topic = topic
        self._stalled_seconds = stalled_seconds
        self._waiting: dict[bytes, ReplayRequest] = {}
        self._arrived = asyncio.Event()
        self.outcomes: Counter[Outcome] = Counter()
        self.batches = 0

    async def run(self, source: Source) -> None:
        """Answer requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._answer_all(source))

    async def _read(self) -> None:
        while True:
            for _ in range(_MESSAGES_AT_ONCE):
                self._add(parse_request(await self._socket.recv_multipart()))
            await asyncio.sleep(_PAUSE_SECONDS)  # ZeroMQ reads no more from peers whose messages wait

    def _add(self, request: ReplayRequest | None) -> None:
        """Keep a request, in place of an earlier one of its peer."""
        if request is None:
            self.outcomes[Outcome.MALFORMED] += 1
        elif len(self._waiting) >= _MOST_WAITING and request.peer not in self._waiting:
            self.outcomes[Outcome.QUEUE_FULL] += 1
        else:
            self._waiting[request.peer] = request
            self._arrived.set()

    async def _answer_all(self, source: Source) -> None:
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            self.outcomes[await self._outcome(source, self._waiting.pop(next(iter(self._waiting))))] += 1

    async def _outcome(self, source: Source, request: ReplayRequest) -> Outcome:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self._answer(source, request)
        except (_Stalled, TimeoutError):
            return Outcome.STALLED
        except (_Overtaken, SnapshotOutgrown):
            return Outcome.OVERTAKEN

    async def _answer(self, source: Source, request: ReplayRequest) -> Outcome:
        stream, first = source.stream, request.first
        whole = request.wants_snapshot or stream.resume(first).batches is None
        if request.wants_snapshot:
            await self._send(request.peer, self._topic, sequence_bytes(stream.epoch), source.description())
        if whole:
            make_room(stream)
            first = stream.next_sequence
            await self._send_snapshot(source, request)
        since = stream.resume(first).batches
        if since is None:
            raise _Overtaken
        for batch in since:  # later ones have reached the subscriber as events
            await self._send_batch(source, request.peer, batch)
        await self._send(request.peer, b"", END, b"")
        return Outcome.SNAPSHOT if whole else Outcome.REPLAYED

    async def _send_snapshot(self, source: Source, request: ReplayRequest) -> None:
        batches = snapshot(source.stream, request.first)
        fills = source.stream.from_zero and not request.wants_snapshot
        for part in consecutive(batches) if fills else batches:
            if isinstance(part, range):
                await self._fill(source, request.peer, part)
            else:
                await self._send_batch(source, request.peer, part)

    async def _fill(self, source: Source, peer: bytes, numbers: range) -> None:
        """Send batches without changes."""
        payload = source.encode(source.stream.batch(numbers.start, []))
        for number in numbers:
            await self._send(peer, self._topic, sequence_bytes(number), payload)
            if not number % _FILLED_AT_ONCE:
                await asyncio.sleep(0)
        self.batches += len(numbers)

    async def _send_batch(self, source: Source, peer: bytes, batch: EventBatch | None) -> None:
        if batch is not None:
            await self._send(peer, self._topic, sequence_bytes(batch.sequence), source.encode(batch))
            self.batches += 1
        await asyncio.sleep(0)

    async def _send(self, peer: bytes, *frames: bytes) -> None:
        """Pass a message to ZeroMQ; wait until there is room for it. Raises _Stalled."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._stalled_seconds, _FIRST_RETRY_SECONDS
        while True:
            try:
                await self._socket.send_multipart((peer, b"", *frames), zmq.NOBLOCK)
                return
            except zmq.Again:
                if loop.time() > until:
                    raise _Stalled from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS)
            except zmq.ZMQError as error:  # the peer is gone
                raise _Stalled from error


def sequence_bytes(sequence: int) -> bytes:
    """Return a sequence number as frames have it."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def parse_request(frames: list[bytes]) -> ReplayRequest | None:
    """Return the request in the frames of a ROUTER socket, None if there is none."""
    peer, *rest = frames
    if len(rest) not in (2, 3) or rest[0] or len(rest[1]) != SEQUENCE_BYTES:
        return None
    if len(rest) == 3 and rest[2] != SNAPSHOT:
        return None
    return ReplayRequest(peer, int.from_bytes(rest[1], "big"), len(rest) == 3)
