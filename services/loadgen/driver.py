"""Runs one process's share of a load: sessions start when they are due, and their calls run in sequence."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

from services.loadgen.clients.target import Client, RequestFailed
from services.loadgen.records import COMPLETED, Record
from services.loadgen.workload.load import Load, Planned
from services.loadgen.workload.workloads import Call

# Requests are made so long before they are due, so that making them delays none.
_LEAD_SECONDS = 0.05


class Progress(NamedTuple):
    """Progress of a driver: counts of requests sent, ended and failed, and of received tokens."""

    sent: int
    ended: int
    failed: int
    tokens: int


class Driver:
    """A running client. `clock` returns seconds since its start; `records` are those of ended requests."""

    def __init__(self, client: Client, load: Load, share: tuple[int, int], clock: Callable[[], float]) -> None:
        self.records: list[Record] = []
        self._client = client
        self._load = load
        self._plan: Iterator[Planned] = load.share(*share)
        self._clock = clock
        self._concurrency = load.share_of_concurrency(*share)
        self._end = math.inf if load.bounds.most_seconds is None else load.bounds.most_seconds
        self._live: dict[int, Record] = {}
        self._tokens_of_ended = 0
        self._failed = 0

    @property
    def progress(self) -> Progress:
        """Current progress."""
        running = sum(record.output_tokens for record in self._live.values())
        ended = len(self.records)
        return Progress(ended + len(self._live), ended, self._failed, self._tokens_of_ended + running)

    async def run(self) -> None:
        """Run the load; a cancellation cancels running requests."""
        if self._load.arrivals.paced:
            await self._open_loop()
        else:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._concurrency or 0):
                    workers.create_task(self._worker())

    async def _open_loop(self) -> None:
        gate = nullcontext() if self._concurrency is None else asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as sessions:
            for planned in self._plan:
                await self._until(planned.start - _LEAD_SECONDS)
                sessions.create_task(self._session(planned, gate))

    async def _worker(self) -> None:
        """Run sessions in sequence until none is left."""
        for planned in self._plan:
            if self._clock() >= self._end:
                return
            await self._session(planned, nullcontext())

    async def _session(self, planned: Planned, gate: AbstractAsyncContextManager[Any]) -> None:
        arrivals = self._load.arrivals
        for place, call in enumerate(planned.session.calls):
            offset = call.offset_seconds / arrivals.speedup if arrivals.paced else 0.0
            due = max(planned.start + offset, self._clock() if place or not arrivals.paced else 0.0)
            if due >= self._end:
                return
            record = Record(planned.first_call + place, planned.number, call.input_tokens, call.output_tokens, due)
            await self._call(call, record, gate)

    async def _call(self, call: Call, record: Record, gate: AbstractAsyncContextManager[Any]) -> None:
        request = self._client.prepare(call.prompt, call.output_tokens)
        await self._until(record.due)
        async with gate:
            record.sent = self._clock()
            self._live[record.number] = record
            try:
                await self._client.send(request, record)
                record.status = COMPLETED
            except RequestFailed as failure:
                record.status, record.message, record.retry_after = failure.status, str(failure), failure.retry_after
                self._failed += 1
            finally:
                del self._live[record.number]
            record.ended = self._clock()
        self._tokens_of_ended += record.output_tokens
        self.records.append(record)

    async def _until(self, moment: float) -> None:
        if (seconds := moment - self._clock()) > 0:
            await asyncio.sleep(seconds)
