"""Which of several engines gets a request.

An engine's load is counted in tokens of work: prompt tokens that it has to compute, and tokens that it generates. The
bound on the load beside the preference for a cached prefix is that of consistent hashing with bounded loads (Mirrokni,
Thorup, Zadimoghaddam, 2018).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

# An engine may have done so many times its share of the recent work before requests go elsewhere.
_MOST_OF_SHARE = 1.25


class RoutingPolicy(Enum):
    """What decides."""

    PREFIX = "prefix"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class RoutingReason(Enum):
    """Why an engine was chosen."""

    ONLY = "only"  # no other was there
    PREFIX = "prefix"  # it has most of the prompt
    LOAD = "load"  # another one has more of the prompt, but too much to do
    NEW = "new"  # none has any of the prompt, and it has least to do
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True)
class Candidate:
    """An engine that could take a request.

    `cached_tokens`: leading tokens of the prompt that it need not compute. `recent_tokens`: the work that it was given
    lately. `requests`: those that it has. `waiting_tokens`: prompt tokens that it has to compute before.
    """

    engine_id: str
    cached_tokens: int = 0
    recent_tokens: float = 0.0
    requests: int = 0
    waiting_tokens: int = 0


@dataclass(frozen=True)
class RoutingChoice:
    """The engine chosen, and why."""

    engine_id: str
    reason: RoutingReason


class RecentLoad:
    """Tokens of work, which count less the longer they are ago; after `seconds` still 1/e of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tokens = 0.0
        self._at = -math.inf

    def add(self, now: float, tokens: float) -> None:
        """Count some more, or fewer. `now` is in seconds, and never goes back."""
        self._tokens = max(0.0, self.tokens(now) + tokens)
        self._at = now

    def tokens(self, now: float) -> float:
        """Return what counts now."""
        return self._tokens * math.exp((self._at - now) / self._seconds)


@dataclass
class Router:
    """Chooses engines. With the policy `prefix`, an engine may be ahead of its share by `slack_tokens` in any case."""

    policy: RoutingPolicy
    slack_tokens: int = 0
    _last: str = field(default="", init=False)

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int) -> RoutingChoice:
        """Choose among candidates, of which there is at least one; with equal ones the smallest id wins."""
        ordered = sorted(candidates, key=lambda one: one.engine_id)
        if len(ordered) == 1:
            return RoutingChoice(ordered[0].engine_id, RoutingReason.ONLY)
        match self.policy:
            case RoutingPolicy.ROUND_ROBIN:
                return self._next(ordered)
            case RoutingPolicy.LEAST_LOADED:
                return RoutingChoice(min(ordered, key=_load).engine_id, RoutingReason.LEAST_LOADED)
            case RoutingPolicy.PREFIX:
                return self._by_prefix(ordered, prompt_tokens)

    def _next(self, ordered: Sequence[Candidate]) -> RoutingChoice:
        self._last = next((one.engine_id for one in ordered if one.engine_id > self._last), ordered[0].engine_id)
        return RoutingChoice(self._last, RoutingReason.ROUND_ROBIN)

    def _by_prefix(self, ordered: Sequence[Candidate], prompt_tokens: int) -> RoutingChoice:
        """Take the one that computes the first token soonest, of those that have not done too much lately."""
        within = [one for one in ordered if self._within_bound(one, ordered, prompt_tokens)]
        least = min(ordered, key=lambda one: one.recent_tokens)
        best = min(
            within or [least],
            key=lambda one: (prompt_tokens - one.cached_tokens + one.waiting_tokens, one.recent_tokens, one.requests),
        )
        most_cached = max(one.cached_tokens for one in ordered)
        if not most_cached:
            return RoutingChoice(best.engine_id, RoutingReason.NEW)
        return RoutingChoice(
            best.engine_id, RoutingReason.PREFIX if best.cached_tokens == most_cached else RoutingReason.LOAD
        )

    def _within_bound(self, one: Candidate, all_of_them: Sequence[Candidate], prompt_tokens: int) -> bool:
        work = prompt_tokens - one.cached_tokens
        share = (sum(other.recent_tokens for other in all_of_them) + work) / len(all_of_them)
        return one.recent_tokens + work <= _MOST_OF_SHARE * share + self.slack_tokens


def _load(one: Candidate) -> tuple[int, int, float]:
    return one.requests, one.waiting_tokens, one.recent_tokens
