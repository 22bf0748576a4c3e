"""What each tenant may have under way, and use: sequences at the same time, and tokens per minute.

Tokens are drawn from a bucket that holds those of one minute and fills evenly. A request reserves the most that it can
use before it begins, and gives back at its end what it did not use: so however many begin together, a tenant never uses
more than it has. A request that can use more than a whole bucket begins with a full one, and what it uses beyond that
is owed: nothing else begins until it is paid back.
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
# Tokens are whole, the bucket's level is not.
_ROUNDING = 0.5


class Reservation:
    """Tokens that a request has been given."""

    def __init__(self, bucket: "_Bucket | None", tokens: int) -> None:
        self._bucket = bucket
        self._tokens = 0
        self._used: Callable[[], int] = lambda: 0
        self._take(tokens)

    def expect(self, most: int, used: Callable[[], int]) -> None:
        """Reserve as many as `most` instead of those before, until the end: then it is as many as `used` says."""
        self._used = used
        self._take(most)

    def settle(self) -> None:
        """Give back what was not used."""
        self._take(self._used())

    def _take(self, tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.add(self._tokens - tokens)
            self._tokens = tokens


class Tenants:
    """The limits of all tenants, and what is taken of them. A caller without a tenant has none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds and never goes back."""
        self._clock = clock
        self._limits: Mapping[str, TenantLimits] = {}
        self._running: dict[str, Limiter] = {}  # while there are any
        self._buckets: dict[str, _Bucket] = {}
        self.rejections: Counter[str] = Counter()  # by tenant
        self._departures = Retention[str](RETENTION_SECONDS, most=MAX_RETAINED_TENANTS)

    def limit(self, limits: Mapping[str, TenantLimits]) -> None:
        """Let these limits count from now on, by tenant. What runs goes on, and counts against them."""
        self._limits = limits
        buckets = {}
        for tenant, own in limits.items():
            if own.tokens_per_minute is not None:
                buckets[tenant] = self._buckets.get(tenant) or _Bucket(own.tokens_per_minute, self._clock)
                buckets[tenant].resize(own.tokens_per_minute)
        self._buckets = buckets

    def names(self) -> set[str]:
        """Return the tenants that have limits, and the empty name of callers without one."""
        return {"", *self._limits}

    def forget(self, now: float) -> None:
        """Forget how often tenants were refused that are gone, a while after that. `now` is in seconds."""
        for tenant in self._departures.due(self.rejections, self._limits, now):
            del self.rejections[tenant]

    @contextmanager
    def admitted(self, caller: Caller, most_tokens: int, sequences: Sequences = ONE_SEQUENCE) -> Iterator[Reservation]:
        """Count a request as under way, with its sequences and the most tokens that it can use.

        Raises Overloaded at a limit, and InvalidField where it has more sequences than the tenant may have. No tokens
        are used up unless the reservation expects otherwise.
        """
        tenant = caller.tenant
        bucket = self._buckets.get(tenant)
        try:
            self._check_sequences(tenant, sequences)
            self._check_tokens(tenant, bucket, most_tokens)
        except Overloaded:
            self.rejections[tenant] += 1
            raise
        reservation = Reservation(bucket, most_tokens)
        self._running.setdefault(tenant, Limiter(1)).enter(reservation, sequences.count, self._clock())
        try:
            yield reservation
        finally:
            reservation.settle()
            self._leave(tenant, reservation)

    def _check_sequences(self, tenant: str, sequences: Sequences) -> None:
        count, field = sequences.count, sequences.field
        most, running = self._limits.get(tenant, _UNLIMITED).max_concurrent_requests, self._running.get(tenant)
        if most is None:
            return
        if count > most:
            raise InvalidField(f"{field} is {count}, tenant {tenant!r} may have {most} sequences under way", field)
        if running and running.level + count > most:
            raise Overloaded(
                f"{running.level} sequences of tenant {tenant!r} are under way, {most} is its limit, "
                f"and this request has {count} ({field})",
                retry_seconds=running.seconds_until(most - count, self._clock()),
                rejection=RejectionReason.TENANT_REQUESTS,
            )

    def _check_tokens(self, tenant: str, bucket: "_Bucket | None", most_tokens: int) -> None:
        if bucket is not None and (seconds := bucket.seconds_until(most_tokens)) > 0:
            state = bucket.state(most_tokens)
            raise Overloaded(
                f"tenant {tenant!r} {state} in {seconds:.1f} s unless others give theirs back before",
                retry_seconds=seconds,
                rejection=RejectionReason.TENANT_TOKENS,
            )

    def _leave(self, tenant: str, reservation: Reservation) -> None:
        self._running[tenant].leave(reservation, self._clock())
        if not len(self._running[tenant]):
            del self._running[tenant]


class _Bucket:
    """Tokens that can be used now. Below 0: owed."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._size = size
        self._tokens = float(size)
        self._filled_at = clock()

    def resize(self, size: int) -> None:
        """Hold another minute's tokens from now on; what is in use or owed stays so."""
        self._fill()
        self._tokens += size - self._size
        self._size = size

    def state(self, tokens: int) -> str:
        """Say what is left, and what a request needs that can use so many."""
        left, minute = math.floor(self._tokens), f"its {self._size} tokens per minute"
        has = f"has {left} of {minute} left" if left >= 0 else f"has used up {minute} and {-left} beyond them"
        whole = f", more than a minute's, and begins with all {self._size}" if tokens > self._size else ""
        return f"{has}: this request can use {tokens}{whole}, which are there"

    def seconds_until(self, tokens: int) -> float:
        """Return when the bucket has so many tokens, or is full."""
        self._fill()
        missing = min(tokens, self._size) - self._tokens
        return missing * _SECONDS_PER_MINUTE / self._size if missing > _ROUNDING else 0.0

    def add(self, tokens: int) -> None:
        """Put tokens in, or with a negative number take some out."""
        self._fill()
        self._tokens = min(float(self._size), self._tokens + tokens)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(float(self._size), self._tokens + (now - self._filled_at) * self._size / _SECONDS_PER_MINUTE)
        self._filled_at = now
