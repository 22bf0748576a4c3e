"""Arrivals of sessions: in a closed loop, random, or at the times of a trace."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from services.loadgen.workload.workloads import Session

# Lengths and arrivals are drawn independently from one seed.
_ARRIVALS = 1


class Timed(NamedTuple):
    """A session and its start, in seconds since the start of the run."""

    start: float
    session: Session


class Arrivals(Protocol):
    """Start times of sessions, and the limit of concurrent requests, if any.

    `paced` says whether calls also wait for their own times within a session, divided by `speedup`.
    """

    @property
    def concurrency(self) -> int | None:
        """Maximum number of concurrent requests."""
        ...

    @property
    def paced(self) -> bool:
        """Whether calls wait for their times."""
        ...

    @property
    def speedup(self) -> float:
        """Factor by which the trace's times are shortened."""
        ...

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Assign start times to sessions, in ascending order."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Return them for a report."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop: the next session starts when one ends, and the calls of a session follow without pauses."""

    concurrency: int
    paced: bool = False
    speedup: float = 1.0

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Assign the start 0 to all sessions."""
        return (Timed(0.0, session) for session in sessions)

    def as_json(self) -> dict[str, Any]:
        """Return it for a report."""
        return {"kind": "closed loop", "concurrency": self.concurrency}


@dataclass(frozen=True)
class Random:
    """Random arrivals at `rate` sessions a second on average.

    The time between two is gamma-distributed with the shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    more evenly. With an infinite rate all start at once.
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0
    concurrency: int | None = None
    paced: bool = True
    speedup: float = 1.0

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Draw the start times, which are determined by the seed."""
        draw = np.random.default_rng([_ARRIVALS, self.seed])
        now = 0.0
        for session in sessions:
            yield Timed(now, session)
            if math.isfinite(self.rate):
                now += float(draw.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))

    def as_json(self) -> dict[str, Any]:
        """Return them for a report."""
        limit = {} if self.concurrency is None else {"concurrency": self.concurrency}
        rate = self.rate if math.isfinite(self.rate) else "inf"
        kind = {"kind": "Poisson"} if self.burstiness == 1 else {"kind": "gamma", "burstiness": self.burstiness}
        return {**kind, "rate": rate, **limit}


@dataclass(frozen=True)
class TraceTimes:
    """Sessions start at the times of the trace, `speedup` times as fast."""

    speedup: float = 1.0
    concurrency: int | None = None
    paced: bool = True

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Return the sessions with their start times of the trace."""
        timed = (Timed(session.start_seconds / self.speedup, session) for session in sessions)
        return iter(sorted(timed, key=lambda one: one.start))

    def as_json(self) -> dict[str, Any]:
        """Return them for a report."""
        limit = {} if self.concurrency is None else {"concurrency": self.concurrency}
        return {"kind": "recorded", "speedup": self.speedup, **limit}
