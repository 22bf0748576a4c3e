"""Who may come in: bounds on the requests under way and on the tokens that wait, and when to come again.

Nothing here waits, and no clock is read: the time is handed in, in seconds. A bound that was reached lets nobody in
until what it counts has fallen to its lower mark. So the time until then is a sum over many departures, which can be
foreseen; how, and with what little is known at first, is in docs/decisions/025-admission-control.md.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from services.gateway.access.token_bound import ONE_SEQUENCE, Sequences
from services.runtime.errors import Overloaded, RejectionReason

# Of a bound. Lower marks make better predictions, higher ones use more of what the bound allows.
LOW_WATERMARK = 0.8
# Retention over which throughput is measured, and so many that nothing need be made up.
_RECENT, _ENOUGH = 64, 8
# An answer takes as long: to come again earlier is of no use.
_SOONEST_SECONDS = 0.01


class Throughput:
    """What leaves a second while a bound is closed: nobody comes, and there is enough to do."""

    def __init__(self) -> None:
        self._counted_seconds = 0.0
        self._counting_since: float | None = None
        self._departed = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT + 1)

    def count(self, counts: bool, now: float) -> None:
        """Say whether the time from now on counts."""
        self._counted_seconds = self._clock(now)
        self._counting_since = now if counts else None

    def left(self, amount: int, now: float) -> None:
        """Note that so much has left."""
        if self._counting_since is not None:
            self._departed += amount
            self._recent.append((self._clock(now), self._departed))

    def measured(self, now: float) -> tuple[int, int, float]:
        """Return how many departures there were after the first of the recent ones, what left with them, and the time.

        From a departure on: before the first of a burst can have ended, nothing leaves, however fast the engine is.
        """
        if not self._recent:
            return 0, 0, 0.0
        began, before = self._recent[0]
        return len(self._recent) - 1, self._departed - before, self._clock(now) - began

    def _clock(self, now: float) -> float:
        since = self._counting_since
        return self._counted_seconds + (0.0 if since is None else now - since)


@dataclass
class _Entry:
    amount: int
    since: float


class Limiter:
    """A sum of amounts that is kept within a limit, and a forecast of when there is room again.

    Whoever is alone fits, whatever the amount: else one that is larger than the limit would never be served.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lower_mark = min(limit - 1, int(limit * LOW_WATERMARK))
        self._entries: dict[object, _Entry] = {}  # oldest first
        self._closed = False
        self._throughput = Throughput()
        self._stay_seconds = 0.0  # mean of those that left, the recent ones above all
        self.level = 0

    def __len__(self) -> int:
        return len(self._entries)

    def seconds_until_room(self, amount: int, now: float) -> float | None:
        """Return None when so much may come in now, else how long until it may; then the bound has closed."""
        room_at = max(0, self._limit - amount)
        target = min(self._lower_mark, room_at)
        if self.level <= (target if self._closed else room_at):
            return None
        self._closed = self.level > self._lower_mark
        self._throughput.count(self._closed, now)
        return self.seconds_until(target, now)

    def seconds_until(self, target: int, now: float) -> float:
        """Foresee how long it takes until the sum has fallen to `target`, if nothing comes in.

        From the recent departures; where these are few, the rest is made up: all that is here leaves in the time that
        those before it stayed, but no less than the oldest has been here already.
        """
        if self.level <= target:
            return 0.0
        count, departed, seconds = self._throughput.measured(now)
        missing, present = max(0, _ENOUGH - count), len(self._entries)
        stay = max(self._stay_seconds, now - next(iter(self._entries.values())).since)
        departed_or_made_up = departed + missing * self.level / present
        seconds_or_made_up = seconds + missing * stay / present
        return max(_SOONEST_SECONDS, (self.level - target) * seconds_or_made_up / departed_or_made_up)

    def enter(self, who: object, amount: int, now: float) -> None:
        """Take somebody in; whether there is room has been asked."""
        self._entries[who] = _Entry(amount, now)
        self._change(amount, now)

    def correct(self, who: object, amount: int, now: float) -> None:
        """Count another amount from now on. This is no departure: nothing was done."""
        if entry := self._entries.get(who):
            difference, entry.amount = amount - entry.amount, amount
            self._change(difference, now)

    def leave(self, who: object, now: float) -> None:
        """Let somebody out; who is not in is ignored."""
        if entry := self._entries.pop(who, None):
            stayed = now - entry.since
            self._stay_seconds += (stayed - self._stay_seconds) / (_ENOUGH if self._stay_seconds else 1)
            self._throughput.left(entry.amount, now)
            self._change(-entry.amount, now)

    def _change(self, difference: int, now: float) -> None:
        self.level += difference
        self._closed = self._closed and self.level > self._lower_mark
        self._throughput.count(self._closed, now)


class AdmittedRequest:
    """A request that was let in."""

    def __init__(self, bounds: "_Bounds") -> None:
        self._bounds = bounds
        self.waiting = True  # no engine has begun it

    def weigh(self, tokens: int, now: float) -> None:
        """Replace the upper limit of its tokens by their number."""
        self._bounds.tokens.correct(self, tokens, now)

    def started(self, now: float) -> None:
        """Its tokens wait no longer: an engine has begun it."""
        self.waiting = False
        self._bounds.tokens.leave(self, now)

    def leave(self, now: float) -> None:
        """It has ended, however it did."""
        self._bounds.tokens.leave(self, now)
        self._bounds.requests.leave(self, now)


@dataclass(frozen=True)
class _Bounds:
    """What a request is counted in: all that are under way, and the tokens that wait for its model."""

    requests: Limiter
    tokens: Limiter


class AdmissionControl:
    """Lets in `max_requests` sequences of requests, and of each model at most `max_queued_tokens` that wait."""

    def __init__(self, max_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._requests = Limiter(max_requests)
        self._tokens: dict[str, Limiter] = {}

    @property
    def requests(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def queued_tokens(self, model: str) -> int:
        """Tokens that wait for a model."""
        return self._tokens[model].level if model in self._tokens else 0

    def retain_models(self, models: Container[str]) -> None:
        """Forget other models, of which nothing waits."""
        self._tokens = {name: bound for name, bound in self._tokens.items() if name in models or len(bound)}

    def admit(self, model: str, tokens: int, now: float, sequences: Sequences = ONE_SEQUENCE) -> AdmittedRequest:
        """Let a request for a served model in, which runs so many sequences and weighs at most so many tokens.

        Raises Overloaded, which says when there is room again.
        """
        bounds = _Bounds(self._requests, self._tokens.setdefault(model, Limiter(self._max_queued_tokens)))
        self._check(bounds, tokens, sequences, now)
        place = AdmittedRequest(bounds)
        bounds.requests.enter(place, sequences.count, now)
        bounds.tokens.enter(place, tokens, now)
        return place

    def seconds_until_next_end(self, now: float) -> float:
        """Foresee when the next of the requests under way ends."""
        return self._requests.seconds_until(self._requests.level - 1, now)

    def _check(self, bounds: _Bounds, tokens: int, sequences: Sequences, now: float) -> None:
        waits = [
            bounds.requests.seconds_until_room(sequences.count, now),
            bounds.tokens.seconds_until_room(tokens, now),
        ]
        seconds = max((wait for wait in waits if wait is not None), default=None)
        if seconds is None:
            return
        if waits[0] is not None:
            what = f"{self._requests.level} sequences are under way, the limit is {self._max_requests}"
            if sequences.count > 1:
                what += f", and {sequences.field} is {sequences.count}"
            refusal = RejectionReason.MAX_REQUESTS
        else:
            what = f"{bounds.tokens.level} tokens wait, the limit is {self._max_queued_tokens}"
            refusal = RejectionReason.MAX_QUEUED_TOKENS
        message = f"{what}; there is room again in about {seconds:.2g} s"
        raise Overloaded(message, retry_seconds=seconds, rejection=refusal)
