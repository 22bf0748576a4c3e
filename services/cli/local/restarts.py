"""The number and the delays of restarts of a service."""

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0


class Restarts:
    """Counts the restarts of one service: at most `most` without a long ready time in between, with growing delays.

    The first one after a ready process is at once: there is nothing to wait for, and every request waits for it. A
    limit per time window would never end a crash loop whose every start takes longer than the window allows.
    """

    def __init__(self, most: int, reset_seconds: float) -> None:
        """Count from 0 again after the service was ready for `reset_seconds`."""
        self.most = most
        self.count = 0
        self._reset_seconds = reset_seconds

    def next_delay(self, ready_seconds: float) -> float | None:
        """Return the seconds until the next start, or None at the limit.

        `ready_seconds` is how long the process that has just ended was ready; 0 if it never was.
        """
        if ready_seconds and ready_seconds >= self._reset_seconds:
            self.count = 0
        if self.count >= self.most:
            return None
        self.count += 1
        if ready_seconds and self.count == 1:
            return 0.0
        return min(FIRST_DELAY_SECONDS * 2.0 ** min(max(self.count - 2, 0), 64), LONGEST_DELAY_SECONDS)
