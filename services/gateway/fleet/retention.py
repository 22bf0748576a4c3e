"""Forgets what is known of engines, tenants and models that are gone: in the chart every rollout brings new ids.

What an engine or a tenant that is gone has counted is shown for a while, so that Prometheus reads the last values and a
link that broke and is up again goes on counting. A model without an engine is remembered: its clients are answered that
it is away, and are counted, so that it can be scaled up from nothing. Only the number of such models is bounded.
"""

import math
from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

# Some scrapes, and longer than an engine takes to come back.
RETENTION_SECONDS = 600.0
MAX_RETAINED_ENGINES = 100
MAX_RETAINED_TENANTS = 1000
MAX_RETAINED_MODELS = 16

K = TypeVar("K", bound=Hashable)


class Retention(Generic[K]):
    """When which of some keys were gone. A key is due after `seconds`; above `most`, those longest gone are at once."""

    def __init__(self, seconds: float = math.inf, *, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._since: dict[K, float] = {}

    def due(self, known: Iterable[K], present: Container[K], now: float) -> list[K]:
        """Return which of the known keys to forget, longest gone first. `now` is in seconds, and never goes back."""
        since = {key: self._since.get(key, now) for key in known if key not in present}
        oldest_first = sorted(since, key=since.__getitem__)
        surplus = len(oldest_first) - self._most
        due = [key for place, key in enumerate(oldest_first) if place < surplus or since[key] + self._seconds <= now]
        self._since = {key: at for key, at in since.items() if key not in set(due)}
        return due
