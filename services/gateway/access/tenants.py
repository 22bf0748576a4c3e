"""Limits of each tenant: sequences in flight, and tokens per minute.

Tokens come from a token bucket that holds one minute's tokens and fills evenly. A request reserves its upper bound at
admission and returns unused tokens at its end, so concurrent requests never exceed the limit. A request with an upper
bound above a full bucket is admitted when the bucket is full. Tokens that it uses beyond that are a debt: the bucket is
negative, and no request is admitted until it has refilled.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from services.gateway.access.admission import Limiter
from services.gateway.access.api_keys import TenantLimits
from services.gateway.access.callers import Caller
from services.gateway.access.token_bound import ONE_SEQUENCE, Sequences
from services.gateway.fleet.retention import MAX_RETAINED_TENANTS, RETENTION_SECONDS, Retention
from services.runtime.errors import InvalidField, Overloaded, RejectionReason

_SECONDS_PER_MINUTE = 60.0
_UNLIMITED = TenantLimits()
# Tokens are integers, the bucket's level is not.
_ROUNDING = 0.5


class Reservation:
    """Tokens that one request has reserved."""

    def __init__(self, bucket: "_TokenBucket | None", tokens: int) -> None:
        self._bucket = bucket
        self._tokens = 0
        self._used: Callable[[], int] = lambda: 0
        self._set(tokens)

    def resize(self, tokens: int, used: Callable[[], int]) -> None:
        """Change the reservation to `tokens`; `settle` reduces it to the result of `used`."""
        self._used = used
        self._set(tokens)

    def settle(self) -> None:
        """Return the unused tokens."""
        self._set(self._used())

    def _set(self, tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.add(self._tokens - tokens)
            self._tokens = tokens


class Tenants:
    """The limits of all tenants and their current use. A caller without a tenant has no limits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds and never decreases."""
        self._clock = clock
        self._limits: Mapping[str, TenantLimits] = {}
        self._running: dict[str, Limiter] = {}  # of tenants with requests in flight
        self._buckets: dict[str, _TokenBucket] = {}
        self.rejections: Counter[str] = Counter()  # by tenant
        self._retention = Retention[str](RETENTION_SECONDS, max_absent=MAX_RETAINED_TENANTS)

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace the limits by tenant. Requests in flight continue and count against the new limits."""
        self._limits = limits
        buckets = {}
        for tenant, own in limits.items():
            if own.tokens_per_minute is not None:
                buckets[tenant] = self._buckets.get(tenant) or _TokenBucket(own.tokens_per_minute, self._clock)
                buckets[tenant].resize(own.tokens_per_minute)
        self._buckets = buckets

    def tenant_names(self) -> set[str]:
        """Return the tenants of the current keys, and the empty name of callers without one."""
        return {"", *self._limits}

    def prune(self, now: float) -> None:
        """Drop the rejection counts of removed tenants after their retention. `now` is in seconds."""
        for tenant in self._retention.expired(self.rejections, self._limits, now):
            del self.rejections[tenant]

    @contextmanager
    def admitted(self, caller: Caller, tokens: int, sequences: Sequences = ONE_SEQUENCE) -> Iterator[Reservation]:
        """Count a request in flight inside the block, and reserve `tokens`, its upper bound.

        Raises Overloaded at a limit, and InvalidField if the request alone exceeds the limit of sequences. All tokens
        are returned at the end unless the reservation was resized.
        """
        tenant = caller.tenant
        bucket = self._buckets.get(tenant)
        try:
            self.check_count(caller, sequences)
            self._check_sequences(tenant, sequences)
            self._check_tokens(tenant, bucket, tokens)
        except Overloaded:
            self.rejections[tenant] += 1
            raise
        reservation = Reservation(bucket, tokens)
        self._running.setdefault(tenant, Limiter(1)).acquire(reservation, sequences.count, self._clock())
        try:
            yield reservation
        finally:
            reservation.settle()
            self._release(tenant, reservation)

    def check_count(self, caller: Caller, sequences: Sequences) -> None:
        """Raise InvalidField if so many sequences of one call exceed the tenant's limit even when it is idle."""
        limit = self._limits.get(caller.tenant, _UNLIMITED).max_concurrent_requests
        if limit is not None and sequences.count > limit:
            raise InvalidField(
                f"{sequences.field} must be at most {limit}, the limit of tenant {caller.tenant!r}, "
                f"not {sequences.count}",
                sequences.field,
            )

    def _check_sequences(self, tenant: str, sequences: Sequences) -> None:
        count, field = sequences.count, sequences.field
        limit, running = self._limits.get(tenant, _UNLIMITED).max_concurrent_requests, self._running.get(tenant)
        if limit is not None and running and running.level + count > limit:
            raise Overloaded(
                f"{running.level} sequences of tenant {tenant!r} are in flight, its limit is {limit}, "
                f"and this request has {count} ({field})",
                retry_seconds=running.seconds_until(limit - count, self._clock()),
                rejection=RejectionReason.TENANT_REQUESTS,
            )

    def _check_tokens(self, tenant: str, bucket: "_TokenBucket | None", tokens: int) -> None:
        if bucket is not None and (seconds := bucket.seconds_until(tokens)) > 0:
            raise Overloaded(
                f"tenant {tenant!r} {bucket.describe(tokens)}; retry in {seconds:.1f} s",
                retry_seconds=seconds,
                rejection=RejectionReason.TENANT_TOKENS,
            )

    def _release(self, tenant: str, reservation: Reservation) -> None:
        self._running[tenant].release(reservation, self._clock())
        if not len(self._running[tenant]):
            del self._running[tenant]


class _TokenBucket:
    """Tokens that can be reserved now; negative while in debt."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._size = size
        self._tokens = float(size)
        self._filled_at = clock()

    def resize(self, size: int) -> None:
        """Change the tokens per minute; reserved and owed tokens stay."""
        self._fill()
        self._tokens += size - self._size
        self._size = size

    def describe(self, tokens: int) -> str:
        """Return the remaining tokens, and those that a request of `tokens` needs."""
        left, limit = math.floor(self._tokens), f"its {self._size} tokens per minute"
        state = f"has {left} of {limit} left" if left >= 0 else f"has exceeded {limit} by {-left}"
        needed = f", more than the limit, and needs all {self._size}" if tokens > self._size else ""
        return f"{state}: this request can use {tokens}{needed}"

    def seconds_until(self, tokens: int) -> float:
        """Return the seconds until the bucket has `tokens`, or is full."""
        self._fill()
        missing = min(tokens, self._size) - self._tokens
        return missing * _SECONDS_PER_MINUTE / self._size if missing > _ROUNDING else 0.0

    def add(self, tokens: int) -> None:
        """Return tokens, or take a negative number of them."""
        self._fill()
        self._tokens = min(float(self._size), self._tokens + tokens)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(float(self._size), self._tokens + (now - self._filled_at) * self._size / _SECONDS_PER_MINUTE)
        self._filled_at = now
