"""Arrivals of sessions: in a closed loop, at random, or at the times of a trace."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from services.loadgen.workload.workloads import Session

# Lengths and arrivals are drawn independently from one seed.
_ARRIVALS = 1


class Timed(NamedTuple):
    """A session, and when it starts: seconds after the beginning."""

    start: float
    session: Session


class Arrivals(Protocol):
    """Start times of sessions, and the limit of concurrent requests, if any.

    `paced` says whether calls also wait for their own times within a session, which pass `speedup` times as fast.
    """

    @property
    def concurrency(self) -> int | None:
        """Requests at a time at most."""
        ...

    @property
    def paced(self) -> bool:
        """Whether calls wait for their times."""
        ...

    @property
    def speedup(self) -> float:
        """How much faster than the trace's its times pass."""
        ...

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Give sessions their starts, in order of these."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Describe them, for a report."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop: the next session starts when one ends, and calls of a session follow at once."""

    concurrency: int
    paced: bool = False
    speedup: float = 1.0

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Let each start as early as it can."""
        return (Timed(0.0, session) for session in sessions)

    def as_json(self) -> dict[str, Any]:
        """Describe it."""
        return {"kind": "closed loop", "concurrency": self.concurrency}


@dataclass(frozen=True)
class Random:
    """Sessions start at `rate` a second on average.

    The time between two is gamma-distributed with the shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    more evenly. An infinite rate lets all start at once.
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0
    concurrency: int | None = None
    paced: bool = True
    speedup: float = 1.0

    def timed(self, sessions: Iterable[Session]) -> Iterator[Timed]:
        """Draw the starts: the same for the same seed."""
        draw = np.random.default_rng([_ARRIVALS, self.seed])
        now = 0.0
        for session in sessions:
            yield Timed(now, session)
            if math.isfinite(self.rate):
                now += float(draw.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))

    def as_json(self) -> dict[str, Any]:
        """Describe them."""
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
        """Describe them."""
        limit = {} if self.concurrency is None else {"concurrency": self.concurrency}
        return {"kind": "recorded", "speedup": self.speedup, **limit}
