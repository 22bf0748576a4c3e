"""Runs loads against a server in sequence, and summarizes each."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.loadgen import processes
from services.loadgen.clients.opening import open_client
from services.loadgen.clients.target import Server, Target
from services.loadgen.driver import Progress
from services.loadgen.processes import Share
from services.loadgen.records import Record
from services.loadgen.statistics import Objectives, Spread, Summary, counted, spread, summarize
from services.loadgen.workload.load import Load

# From here on the client has a part in the latencies that it measures.
_BUSY_SHARE = 0.8
_LATE_SECONDS = 0.02


@dataclass(frozen=True)
class ClientUse:
    """Client resources of a load: CPU of all processes, and lateness of event loops in seconds.

    `busiest_cpu_share` is the share of a core used by the busiest process.
    """

    processes: int
    cpu_seconds: float
    cpu_microseconds_per_token: float | None
    busiest_cpu_share: float
    loop_lag_seconds: Spread | None

    @property
    def is_bottleneck(self) -> bool:
        """Whether the client may have been the bottleneck."""
        late = self.loop_lag_seconds is not None and self.loop_lag_seconds.p99 > _LATE_SECONDS
        return late or self.busiest_cpu_share > _BUSY_SHARE


@dataclass(frozen=True)
class Run:
    """One load and its results."""

    load: Load
    records: list[Record]
    summary: Summary
    client: ClientUse
    interrupted: bool

    @property
    def counted(self) -> list[Record]:
        """The records after the warm-up."""
        return counted(self.records, self.load.bounds)

    def as_json(self) -> dict[str, Any]:
        """Return the run for a report."""
        client = {**vars(self.client), "was_the_limit": self.client.is_bottleneck}
        lag = self.client.loop_lag_seconds
        return {
            "arrivals": self.load.arrivals.as_json(),
            "interrupted": self.interrupted,
            **self.summary.as_json(),
            "client": client | {"loop_lag_seconds": None if lag is None else vars(lag)},
        }


def describe(target: Target) -> Server:
    """Fetch a server's description. Raises Unreachable."""
    return asyncio.run(_describe(target))


def completed_by(target: Target, server: Server) -> Target:
    """Fill in the server's model name and vocabulary size, unless they were given."""
    vocabulary = target.vocabulary_size or server.vocabulary_size
    return replace(target, model=target.model or server.model, vocabulary_size=vocabulary)


def measure(
    target: Target,
    load: Load,
    process_count: int,
    objectives: Objectives,
    seen: Callable[[float, Sequence[Progress]], None],
) -> Run:
    """Run a load. Raises ProcessDied, Unreachable."""
    shares, interrupted = processes.run(target, load, process_count, seen)
    records = sorted((record for share in shares for record in share.records), key=lambda record: record.sent)
    return Run(load, records, summarize(records, load.bounds, objectives), client_use(shares), interrupted)


def client_use(shares: Sequence[Share]) -> ClientUse:
    """Return the resources that the processes of a run used."""
    used = sum(share.cpu_seconds for share in shares)
    tokens = sum(record.output_tokens for share in shares for record in share.records)
    busiest = max(share.cpu_seconds / share.seconds if share.seconds else 0.0 for share in shares)
    lags = spread(np.concatenate([np.array(share.lags) for share in shares]))
    return ClientUse(len(shares), used, used / tokens * 1e6 if tokens else None, busiest, lags)


async def _describe(target: Target) -> Server:
    client = open_client(target, time.monotonic)
    try:
        return await client.describe()
    finally:
        await client.close()
