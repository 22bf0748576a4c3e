"""The block steps of a decoding batch, and an engine's stream to a KV manager."""

import asyncio
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

import kvmanager
from blocks import Allocate, Commit, Extend, Free, FreeReason, Length, Step, blocks_for
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.wire.attach import register_message
from services.wire.report import pages_of

Call = grpc.aio.StreamStreamCall[Any, Any]

SEQUENCES, BLOCK_SIZE = 256, 16
POOL_BLOCKS = 100_000
MICRO = 1e6
_TOKENS = 4096


class DecodingBatch:
    """Generates the block steps of a decoding batch; blocks fill up evenly over time."""

    def __init__(self, sequences: int, seed: int = 1) -> None:
        draw = random.Random(seed)
        self.sequences = sequences
        self._tokens = [array("i", (draw.randrange(49_000) for _ in range(_TOKENS))) for _ in range(sequences)]
        self._number = 0

    def _begin(self) -> Step:
        """Allocate all sequences, without cached blocks of earlier ones."""
        self._number += 1
        salt = self._number.to_bytes(8)
        self._computed = [BLOCK_SIZE * 2 + number % BLOCK_SIZE for number in range(self.sequences)]
        self._committed = [0] * self.sequences
        self._room = [blocks_for(tokens, BLOCK_SIZE) * BLOCK_SIZE for tokens in self._computed]
        return Step(
            self._number,
            allocates=[
                Allocate(number, number, f"r{number}", salt, tokens[:length], length)
                for number, (tokens, length) in enumerate(zip(self._tokens, self._computed, strict=True), 1)
            ],
        )

    def _next(self) -> Step:
        """Extend each sequence by one token."""
        self._number += 1
        commits, extends, lengths = [], [], []
        for index, computed in enumerate(self._computed):
            done = computed // BLOCK_SIZE
            if done > self._committed[index]:
                first = self._committed[index]
                tokens = self._tokens[index][first * BLOCK_SIZE : done * BLOCK_SIZE]
                commits.append(Commit(index + 1, first, tokens))
                self._committed[index] = done
            if computed + 2 > self._room[index]:
                extends.append(Extend(index + 1, [(index + 1, computed + 2)]))
                self._room[index] += BLOCK_SIZE
            lengths.append(Length(index + 1, computed))
            self._computed[index] = computed + 1
        return Step(self._number, commits=commits, extends=extends, lengths=lengths)

    def steps(self, count: int) -> Iterator[Step]:
        """Yield the block step that allocates all, the one that commits their prompts, and `count` more."""
        yield self._begin()
        for _ in range(1 + count):
            yield self._next()

    def endless_steps(self) -> Iterator[Step]:
        """Yield block steps without end: when the tokens are used up, all sequences are freed and allocated again."""
        while True:
            yield from self.steps(_TOKENS - 3 * BLOCK_SIZE - 2)
            self._number += 1
            yield Step(
                self._number, frees=[Free(number, FreeReason.FINISHED) for number in range(1, self.sequences + 1)]
            )


async def attach(
    channel: grpc.aio.Channel, spec: kvmanager.PoolSpec, report: kvmanager.PoolReport | None = None
) -> Call:
    """Open the stream of an engine, attached with a report of its pool."""
    return await attach_with(channel, spec, pages_of(report or kvmanager.PoolReport()))


async def attach_with(channel: grpc.aio.Channel, spec: kvmanager.PoolSpec, pages: Iterable[pb.ReportPage]) -> Call:
    """Open the stream of an engine, attached with the pages of a report."""
    call = pb_grpc.KVManagerStub(channel).Attach()
    await call.write(pb.PoolRequest(register=register_message(spec)))
    for page in pages:
        await call.write(pb.PoolRequest(report=page))
    while True:
        first = await call.read()
        assert isinstance(first, pb.PoolResponse)
        if not first.HasField("attaching"):
            break
    assert first.HasField("registered")
    return call


async def round_trip(call: Call, message: pb.PoolRequest) -> float:
    """Send a block step, check that no item is refused, and return the microseconds until its result."""
    begun = time.perf_counter()
    await call.write(message)
    await read_result(call)
    return (time.perf_counter() - begun) * MICRO


async def read_result(call: Call) -> None:
    """Read the result of the next block step, and check that no item is refused."""
    response = await call.read()
    assert isinstance(response, pb.PoolResponse)
    assert not response.result.refusals


async def begun(
    channel: grpc.aio.Channel, engine_id: str, pool_blocks: int, messages: Sequence[pb.PoolRequest]
) -> Call:
    """Attach an engine, and run the first two block steps of a batch, which begin it."""
    call = await attach(channel, kvmanager.PoolSpec(engine_id, 1, "model", BLOCK_SIZE, pool_blocks))
    for message in messages[:2]:
        await round_trip(call, message)
    return call


async def offered(call: Call, messages: Iterable[pb.PoolRequest], due: Iterable[float]) -> list[float]:
    """Send a block step at each time; return the microseconds from then, not from a late send, until its result.

    A block step does not wait for the result of the one before.
    """
    sent: asyncio.Queue[float | None] = asyncio.Queue()

    async def send() -> None:
        for message, at in zip(messages, due, strict=False):
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            sent.put_nowait(at)
            await call.write(message)
        sent.put_nowait(None)

    sending, trips = asyncio.create_task(send()), []
    while (at := await sent.get()) is not None:
        await read_result(call)
        trips.append((time.perf_counter() - at) * MICRO)
    await sending
    return trips
