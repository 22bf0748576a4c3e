"""A load: a workload, its arrivals and its bounds."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from services.loadgen.workload.arrivals import Arrivals, Timed
from services.loadgen.workload.workloads import Call, Session, Workload


@dataclass(frozen=True)
class Bounds:
    """The length of a load: a number of `requests`, or `seconds` in which requests start; None: no such bound.

    `warmup` is in the unit of the bound, requests or seconds. It precedes the bound and is not counted.
    """

    requests: int | None = None
    seconds: float | None = None
    warmup: float = 0.0

    @property
    def most_requests(self) -> int | None:
        """Maximum number of requests, including the warm-up."""
        return None if self.requests is None else self.requests + self.warmup_requests

    @property
    def most_seconds(self) -> float | None:
        """Seconds in which requests may start, including the warm-up."""
        return None if self.seconds is None else self.seconds + self.warmup_seconds

    @property
    def warmup_requests(self) -> int:
        """Number of first requests that are not counted."""
        return 0 if self.seconds is not None else int(self.warmup)

    @property
    def warmup_seconds(self) -> float:
        """Requests sent before this time are not counted."""
        return self.warmup if self.seconds is not None else 0.0


class Planned(NamedTuple):
    """A session to run: its number, the number of its first call among all calls, and its start."""

    number: int
    first_call: int
    start: float
    session: Session


@dataclass(frozen=True)
class Load:
    """The load of one run."""

    workload: Workload
    arrivals: Arrivals
    bounds: Bounds

    def planned(self) -> Iterator[Planned]:
        """Yield all sessions within the bounds, numbered, in order of their starts."""
        calls = 0
        for number, timed in enumerate(self.arrivals.timed(self.workload.sessions())):
            allowed = self._allowed(timed, calls)
            if not allowed:
                return
            yield Planned(number, calls, timed.start, Session(allowed, timed.session.start_seconds))
            calls += len(allowed)

    def share(self, process: int, processes: int) -> Iterator[Planned]:
        """Yield the sessions of one of several processes, which together run all sessions."""
        return islice(self.planned(), process, None, processes)

    def share_of_concurrency(self, process: int, processes: int) -> int | None:
        """Return the maximum number of concurrent requests of one process; None: no limit."""
        most = self.arrivals.concurrency
        return None if most is None else most // processes + (process < most % processes)

    def request_count(self) -> int | None:
        """Return the number of requests, None if only time bounds them."""
        if self.bounds.requests is None and self.bounds.seconds is not None:
            return None
        return sum(len(planned.session.calls) for planned in self.planned())

    def _allowed(self, timed: Timed, calls: int) -> tuple[Call, ...]:
        if self.bounds.most_seconds is not None and timed.start >= self.bounds.most_seconds:
            return ()
        most = self.bounds.most_requests
        return timed.session.calls[: None if most is None else most - calls]
