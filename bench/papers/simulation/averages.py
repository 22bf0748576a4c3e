"""What is averaged over a run: requests in the batch, use of memory, and the latency of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from bench.papers.simulation.traces import Arrival


@dataclass
class Averages:
    """Means over the steps between `begin` and `end`, in seconds of the virtual clock.

    `add_step` weighs the running requests by the duration of the step; shares of memory count the same for each step.
    """

    begin: float
    end: float
    seconds: float = 0.0
    _batched_seconds: float = 0.0
    _shares: list[Mapping[str, float]] = field(default_factory=list)

    def open(self, now: float) -> bool:
        """Return whether a time is within the averages."""
        return self.begin <= now <= self.end

    def add_step(self, running: int, seconds: float) -> None:
        """Add a step of `seconds` in which `running` requests took part."""
        self._batched_seconds += running * seconds
        self.seconds += seconds

    def add_shares(self, shares: Mapping[str, float]) -> None:
        """Add shares of the memory at the end of a step."""
        self._shares.append(shares)

    @property
    def batched(self) -> float:
        """Mean number of running requests."""
        return self._batched_seconds / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Mean shares over all steps, empty if none were added."""
        first = next(iter(self._shares), {})
        return {kind: fmean(one[kind] for one in self._shares) for kind in first}


class Latencies:
    """The normalized latency of a run: the mean over all requests of end-to-end time divided by output length."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        """Start with all requests still to arrive."""
        self._arrivals = arrivals
        self._ends: dict[int, float] = {}  # in seconds, by number

    @property
    def ended(self) -> int:
        """Number of requests that have ended."""
        return len(self._ends)

    def end(self, number: int, now: float) -> None:
        """Record the end of a request."""
        self._ends[number] = now

    def end_together(self, numbers: Sequence[int]) -> None:
        """Move the ends of a static batch, whose answers are returned at once, to the last one."""
        ended = [number for number in numbers if number in self._ends]
        last = max((self._ends[number] for number in ended), default=0.0)
        self._ends.update(dict.fromkeys(ended, last))

    def mean(self, arrived: int, now: float) -> float:
        """Return the normalized latency in seconds per token if the first `arrived` requests end at `now` or earlier.

        It is a lower bound while requests are live, and exact once all have ended.
        """
        if not self._arrivals:
            return 0.0
        return sum(self._per_token(number, now) for number in range(arrived)) / len(self._arrivals)

    def _per_token(self, number: int, now: float) -> float:
        arrival = self._arrivals[number]
        return (self._ends.get(number, now) - arrival.seconds) / arrival.lengths.output
