"""Chooses the engine for a request.

Load is counted in tokens of work: prompt tokens to compute, and generated tokens. Routing by prefix bounds the load as
consistent hashing with bounded loads does (Mirrokni, Thorup, Zadimoghaddam, 2018).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

# Requests avoid an engine whose recent load exceeds this multiple of its fair share.
_LOAD_FACTOR = 1.25


class RoutingPolicy(Enum):
    """How engines are chosen."""

    PREFIX = "prefix"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class RoutingReason(Enum):
    """Why an engine was chosen."""

    ONLY = "only"  # the only candidate
    PREFIX = "prefix"  # has the longest cached prefix
    LOAD = "load"  # another engine has a longer cached prefix, but too much load
    NEW = "new"  # no engine has a cached prefix; this one has the least load
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True)
class Candidate:
    """An engine that accepts requests, as seen by one request.

    `cached_tokens`: leading prompt tokens in its prefix cache. `recent_tokens`: its recent load, decayed. `requests`:
    its requests in flight. `pending_prefill_tokens`: prompt tokens that it must compute first.
    """

    engine_id: str
    cached_tokens: int = 0
    recent_tokens: float = 0.0
    requests: int = 0
    pending_prefill_tokens: int = 0


@dataclass(frozen=True)
class RoutingChoice:
    """The chosen engine and the reason."""

    engine_id: str
    reason: RoutingReason


class RecentLoad:
    """A sum of tokens with exponential decay; `seconds` is the time constant."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tokens = 0.0
        self._at = -math.inf

    def add(self, now: float, tokens: float) -> None:
        """Add tokens, or correct an earlier estimate by a negative number. `now` is in seconds and never decreases."""
        self._tokens = max(0.0, self.tokens(now) + tokens)
        self._at = now

    def tokens(self, now: float) -> float:
        """Return the decayed sum."""
        return self._tokens * math.exp((self._at - now) / self._seconds)


@dataclass
class Router:
    """Chooses engines. With the policy `prefix`, an engine may exceed its share by `slack_tokens` in any case."""

    policy: RoutingPolicy
    slack_tokens: int = 0
    _last: str = field(default="", init=False)

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int) -> RoutingChoice:
        """Choose one of at least one candidate; the smallest id wins a tie."""
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
        """Choose the engine with the shortest expected time to first token among those within the load bound."""
        within = [one for one in ordered if self._within_bound(one, ordered, prompt_tokens)]
        least_loaded = min(ordered, key=lambda one: one.recent_tokens)
        best = min(
            within or [least_loaded],
            key=lambda one: (
                prompt_tokens - one.cached_tokens + one.pending_prefill_tokens,
                one.recent_tokens,
                one.requests,
            ),
        )
        longest = max(one.cached_tokens for one in ordered)
        if not longest:
            return RoutingChoice(best.engine_id, RoutingReason.NEW)
        reason = RoutingReason.PREFIX if best.cached_tokens == longest else RoutingReason.LOAD
        return RoutingChoice(best.engine_id, reason)

    def _within_bound(self, one: Candidate, candidates: Sequence[Candidate], prompt_tokens: int) -> bool:
        work = prompt_tokens - one.cached_tokens
        share = (sum(other.recent_tokens for other in candidates) + work) / len(candidates)
        return one.recent_tokens + work <= _LOAD_FACTOR * share + self.slack_tokens


def _load(one: Candidate) -> tuple[int, int, float]:
    return one.requests, one.pending_prefill_tokens, one.recent_tokens
