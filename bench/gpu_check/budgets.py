"""The parts of the check in their order, and how the time of a run is divided between them. Pure functions."""

import time
from collections.abc import Callable, Sequence

SECONDS = 540.0  # of the whole, so that one call of ten minutes includes the start and the end
# The last part takes what the others leave, which is at least its budget here if none runs over.
BUDGETS = {
    "ceilings": 20.0,
    "exactness": 60.0,
    "start": 75.0,
    "llama": 110.0,
    "sampler": 50.0,
    "decode": 50.0,
    "sweep": 65.0,
    "prefill": 40.0,
    "copies": 30.0,
    "tests": 40.0,
}
_LAST_SECONDS, _LAST_SHARE = 5.0, 0.1


def limit_of(own: float, later: Sequence[float], left: float) -> float:
    """Return the time limit of a part in seconds, given its budget, those of later parts, and the time left.

    If the time left is less than the sum of all budgets, limits shrink in proportion. The last part gets what is left.
    """
    left = max(0.0, left)
    return min(own, left * own / (own + sum(later))) if later else left


def working_seconds(limit: float) -> float:
    """Return the seconds of a limit after which a part begins nothing new, so that it ends before it is killed."""
    return limit - min(_LAST_SECONDS, _LAST_SHARE * limit)


class Deadline:
    """A moment until which a part may begin another measurement."""

    def __init__(self, at: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`at` and the clock are seconds; the default clock is the same in all processes of a machine."""
        self._at = at
        self._clock = clock

    def left(self) -> float:
        """Return the seconds until then, at least 0."""
        return max(0.0, self._at - self._clock())

    def passed(self) -> bool:
        """Return whether it is past."""
        return self.left() == 0

    def part(self, share: float) -> "Deadline":
        """Return the deadline after this share of the time that is left."""
        return Deadline(self._clock() + share * self.left(), self._clock)
