"""How long a gateway keeps its state of engines, tenants and models that are gone. Every rollout brings new engine ids.

The counters of an engine or tenant stay for a while: Prometheus reads their last values, and an engine that reconnects
continues its counters. A model without engines stays known, so that its requests are answered UNAVAILABLE and counted,
and an autoscaler can start it from zero. Only the number of such models is bounded.
"""

import math
from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

# Several scrapes, and longer than an engine takes to restart.
RETENTION_SECONDS = 600.0
MAX_RETAINED_ENGINES = 100
MAX_RETAINED_TENANTS = 1000
MAX_RETAINED_MODELS = 16

K = TypeVar("K", bound=Hashable)


class Retention(Generic[K]):
    """Decides which absent keys to drop: those absent for `seconds`, and the oldest above `max_absent`."""

    def __init__(self, seconds: float = math.inf, *, max_absent: int) -> None:
        self._seconds = seconds
        self._max_absent = max_absent
        self._absent_since: dict[K, float] = {}

    def expired(self, known: Iterable[K], present: Container[K], now: float) -> list[K]:
        """Return the known keys to drop, longest absent first. `now` is in seconds and never decreases."""
        since = {key: self._absent_since.get(key, now) for key in known if key not in present}
        oldest_first = sorted(since, key=since.__getitem__)
        surplus = len(oldest_first) - self._max_absent
        expired = [
            key for index, key in enumerate(oldest_first) if index < surplus or since[key] + self._seconds <= now
        ]
        self._absent_since = {key: at for key, at in since.items() if key not in set(expired)}
        return expired
