"""Admission control: limits on requests in flight and queued tokens, and an estimate of when to retry.

Nothing here waits or reads a clock: callers pass the time, in seconds. A limit that was reached admits nothing until
its level has fallen to the low watermark. The time until then is a sum over many departures, so it can be estimated.
docs/decisions/025-admission-control.md explains the estimate.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from services.gateway.access.token_bound import ONE_SEQUENCE, Sequences
from services.runtime.errors import Overloaded, RejectionReason

# As a fraction of the limit. A lower mark makes estimates better, a higher one admits more.
LOW_WATERMARK = 0.8
# Departures over which throughput is measured, and the number below which it is extrapolated.
_RECENT_DEPARTURES, _MIN_DEPARTURES = 64, 8
# A response takes about as long, so an earlier retry is of no use.
_MIN_RETRY_SECONDS = 0.01


class Throughput:
    """Measures departures per second while a limiter is closed, so that arrivals and idle time do not count."""

    def __init__(self) -> None:
        self._measured_seconds = 0.0
        self._measuring_since: float | None = None
        self._departed = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_DEPARTURES + 1)

    def set_measuring(self, measuring: bool, now: float) -> None:
        """Start or stop the measurement."""
        self._measured_seconds = self._clock(now)
        self._measuring_since = now if measuring else None

    def on_departure(self, amount: int, now: float) -> None:
        """Count an amount that departed."""
        if self._measuring_since is not None:
            self._departed += amount
            self._recent.append((self._clock(now), self._departed))

    def measured(self, now: float) -> tuple[int, int, float]:
        """Return the number of recent departures after the first, their amount, and the seconds since the first.

        The first departure starts the measurement, because nothing can depart before a burst's first request ends.
        """
        if not self._recent:
            return 0, 0, 0.0
        start, before = self._recent[0]
        return len(self._recent) - 1, self._departed - before, self._clock(now) - start

    def _clock(self, now: float) -> float:
        since = self._measuring_since
        return self._measured_seconds + (0.0 if since is None else now - since)


@dataclass
class _Entry:
    amount: int
    since: float


class Limiter:
    """Keeps a sum of amounts within a limit, and estimates when there is room again.

    A single entry is always admitted, or one larger than the limit would never run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._low_watermark = min(limit - 1, int(limit * LOW_WATERMARK))
        self._entries: dict[object, _Entry] = {}  # oldest first
        self._closed = False
        self._throughput = Throughput()
        self._stay_seconds = 0.0  # moving average over released entries
        self.level = 0

    def __len__(self) -> int:
        return len(self._entries)

    def retry_seconds(self, amount: int, now: float) -> float | None:
        """Return None if `amount` fits now. Otherwise close, and return the estimated seconds until it fits."""
        room_at = max(0, self._limit - amount)
        target = min(self._low_watermark, room_at)
        if self.level <= (target if self._closed else room_at):
            return None
        self._closed = self.level > self._low_watermark
        self._throughput.set_measuring(self._closed, now)
        return self.seconds_until(target, now)

    def seconds_until(self, target: int, now: float) -> float:
        """Estimate the seconds until the level has fallen to `target`, without arrivals.

        Uses the recent departures. If these are few, the missing ones are extrapolated: all entries depart within the
        average stay of earlier entries, or the age of the oldest entry if that is longer.
        """
        if self.level <= target:
            return 0.0
        count, departed, seconds = self._throughput.measured(now)
        missing, present = max(0, _MIN_DEPARTURES - count), len(self._entries)
        stay = max(self._stay_seconds, now - next(iter(self._entries.values())).since)
        total_departed = departed + missing * self.level / present
        total_seconds = seconds + missing * stay / present
        return max(_MIN_RETRY_SECONDS, (self.level - target) * total_seconds / total_departed)

    def acquire(self, key: object, amount: int, now: float) -> None:
        """Add an entry. The caller has checked that it fits."""
        self._entries[key] = _Entry(amount, now)
        self._change(amount, now)

    def resize(self, key: object, amount: int, now: float) -> None:
        """Change the amount of an entry, if it is there. This is not a departure: no work was done."""
        if entry := self._entries.get(key):
            difference, entry.amount = amount - entry.amount, amount
            self._change(difference, now)

    def release(self, key: object, now: float) -> None:
        """Remove an entry, if it is there, as a departure."""
        if entry := self._entries.pop(key, None):
            stay = now - entry.since
            self._stay_seconds += (stay - self._stay_seconds) / (_MIN_DEPARTURES if self._stay_seconds else 1)
            self._throughput.on_departure(entry.amount, now)
            self._change(-entry.amount, now)

    def _change(self, difference: int, now: float) -> None:
        self.level += difference
        self._closed = self._closed and self.level > self._low_watermark
        self._throughput.set_measuring(self._closed, now)


class AdmissionSlot:
    """An admitted request's share of the limits."""

    def __init__(self, limiters: "_Limiters") -> None:
        self._limiters = limiters
        self.queued = True  # until an engine starts the request

    def set_tokens(self, tokens: int, now: float) -> None:
        """Replace the upper bound of the request's tokens by a better one."""
        self._limiters.tokens.resize(self, tokens, now)

    def on_started(self, now: float) -> None:
        """Release the queued tokens, because an engine has started the request."""
        self.queued = False
        self._limiters.tokens.release(self, now)

    def release(self, now: float) -> None:
        """Release everything at the end of the request."""
        self._limiters.tokens.release(self, now)
        self._limiters.requests.release(self, now)


@dataclass(frozen=True)
class _Limiters:
    """`requests` counts sequences in flight of all models, `tokens` the queued tokens of one model."""

    requests: Limiter
    tokens: Limiter


class AdmissionControl:
    """Admits up to `max_requests` sequences in flight, and up to `max_queued_tokens` queued tokens of each model."""

    def __init__(self, max_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._requests = Limiter(max_requests)
        self._tokens: dict[str, Limiter] = {}

    @property
    def requests(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def queued_tokens(self, model: str) -> int:
        """Return the queued tokens of a model."""
        return self._tokens[model].level if model in self._tokens else 0

    def retain_models(self, models: Container[str]) -> None:
        """Drop the limiters of other models that have no queued tokens."""
        self._tokens = {name: limiter for name, limiter in self._tokens.items() if name in models or len(limiter)}

    def admit(self, model: str, tokens: int, now: float, sequences: Sequences = ONE_SEQUENCE) -> AdmissionSlot:
        """Admit a request for a served model; `tokens` is its upper bound. Raises Overloaded with the retry time."""
        limiters = _Limiters(self._requests, self._tokens.setdefault(model, Limiter(self._max_queued_tokens)))
        self._check(limiters, tokens, sequences, now)
        slot = AdmissionSlot(limiters)
        limiters.requests.acquire(slot, sequences.count, now)
        limiters.tokens.acquire(slot, tokens, now)
        return slot

    def seconds_until_next_end(self, now: float) -> float:
        """Estimate the seconds until a request in flight ends."""
        return self._requests.seconds_until(self._requests.level - 1, now)

    def _check(self, limiters: _Limiters, tokens: int, sequences: Sequences, now: float) -> None:
        waits = [
            limiters.requests.retry_seconds(sequences.count, now),
            limiters.tokens.retry_seconds(tokens, now),
        ]
        seconds = max((wait for wait in waits if wait is not None), default=None)
        if seconds is None:
            return
        if waits[0] is not None:
            message = f"{self._requests.level} sequences are in flight, the limit is {self._max_requests}"
            if sequences.count > 1:
                message += f", and {sequences.field} is {sequences.count}"
            reason = RejectionReason.MAX_REQUESTS
        else:
            message = f"{limiters.tokens.level} tokens are queued, the limit is {self._max_queued_tokens}"
            reason = RejectionReason.MAX_QUEUED_TOKENS
        raise Overloaded(f"{message}; retry in about {seconds:.2g} s", retry_seconds=seconds, rejection=reason)
