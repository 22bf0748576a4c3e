"""Divides the token budget of a step among prompts, so that a short prompt does not wait for the rest of a long one.

In the order of the PagedAttention paper the first prompt receives all that is left. Then a request of 64 tokens waits
for all of a prompt of 60,000 before it. With a threshold, prompts with more uncomputed tokens are *long*. A long prompt
receives what the short ones of its priority, and of better ones, leave. While such a prompt is in prefill, or is about
to be admitted, the step is *limited*: long prompts receive a small part of it at most, so that it is short. After
`MAX_LIMITED_STEPS` in a row one step is computed in the order of the queue, so that a long prompt is never stopped,
even if short ones could fill all steps.

A long prompt is not long up to the blocks that a waiting request shares with it: see `PrefixClaims`. These blocks are
computed in the place of the first such request, if that is before the prompt's own.

Names as in vLLM: long_prefill_token_threshold, max_num_partial_prefills, max_long_partial_prefills.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

from engine.schedule.planning.step_work import Cursor
from engine.schedule.pool.prefix_claims import PrefixClaims
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group

# Part of the token budget for long prompts in a limited step, and the most limited steps in a row.
LIMITED_PART = 32
MAX_LIMITED_STEPS = 8
# Limited steps for a group that is not admitted yet. The answer takes less than a step, unless the manager is away.
_MAX_AWAITING_STEPS = 2


class _Demand(NamedTuple):
    """Tokens that a prompt can compute next; `rest`: those for which it is long."""

    position: int
    tokens: int
    rest: bool


class PrefillOrder:
    """Decides how many tokens each prompt in prefill receives. `next_admitted` returns the group admitted next."""

    def __init__(self, queue: RequestQueue, claims: PrefixClaims, next_admitted: Callable[[], Group | None]) -> None:
        self._queue = queue
        self._claims = claims
        self._next_admitted = next_admitted
        self._limited_steps = 0  # in a row

    @property
    def limited(self) -> bool:
        """Whether the latest step was limited."""
        return self._limited_steps > 0

    def divide(self, prompts: list[Cursor], budget: int) -> list[int]:
        """Return the number of tokens that each prompt receives; 0 for a prompt without room, or if none is left.

        Prompts are in the order of the queue.
        """
        limits = self._queue.limits
        given = [0] * len(prompts)
        limited = False
        for rest, run in groupby(self._demands(prompts), key=lambda demand: demand.rest):
            demands = list(run)
            part = budget
            if rest and self._is_limited(prompts, demands):
                limited = True
                part = min(budget, max(1, limits.token_budget // LIMITED_PART))
            most = limits.max_long_partial_prefills if rest else limits.max_num_partial_prefills
            for demand, tokens in zip(demands, divided([one.tokens for one in demands], part, most), strict=True):
                given[demand.position] += tokens
                budget -= tokens
        self._limited_steps = self._limited_steps + 1 if limited else 0
        if limited:
            self._queue.totals.count_limited()
        return given

    def _demands(self, prompts: list[Cursor]) -> Iterable[_Demand]:
        """Return what the prompts can compute, in the order in which it is served."""
        threshold = self._queue.limits.long_prefill_token_threshold
        last: dict[int, int] = {}  # position of the last short prompt, by priority
        demands: list[tuple[float, _Demand]] = []
        rests = []
        for index, cursor in enumerate(prompts):
            tokens = min(cursor.remaining, cursor.sequence.room - cursor.start)
            place, awaited = self._awaited(prompts, index)
            urgent = min(tokens, awaited)
            if threshold and cursor.remaining > threshold:
                rests.append(_Demand(index, tokens - urgent, rest=True))
            else:
                last[_priority(cursor)] = index
                urgent = urgent if place < index else tokens
                demands.append((index, _Demand(index, tokens - urgent, rest=False)))
            demands.append((place, _Demand(index, urgent, rest=False)))
        for rest in rests:
            priority = _priority(prompts[rest.position])
            behind = [position for other, position in last.items() if other <= priority and not self._in_order]
            demands.append((max([rest.position, *behind]), rest))
        served = sorted(demands, key=lambda pair: (pair[0], pair[1].rest, pair[1].position))
        return [demand for _, demand in served if demand.tokens]

    def _awaited(self, prompts: list[Cursor], index: int) -> tuple[float, int]:
        """Return the place in which a prompt's awaited tokens are computed, and how many are left of them."""
        group = prompts[index].sequence.group
        awaited = self._claims.awaited(group)
        if awaited is None:
            return index, 0
        left = max(0, awaited.tokens - prompts[index].start)
        if awaited.key > group.key:
            return index, left
        return bisect_left(prompts, awaited.key, key=lambda cursor: cursor.sequence.group.key) - 0.5, left

    @property
    def _in_order(self) -> bool:
        """Whether this step is computed in the order of the queue, so that short prompts cannot starve long ones."""
        return self._limited_steps >= MAX_LIMITED_STEPS

    def _is_limited(self, prompts: list[Cursor], rests: list[_Demand]) -> bool:
        """Return whether a short prompt takes part in the step, or in the next one."""
        if self._in_order:
            return False
        priority = max(_priority(prompts[rest.position]) for rest in rests)
        if any(self._is_short(cursor.remaining) and _priority(cursor) <= priority for cursor in prompts):
            return True
        if self._limited_steps >= _MAX_AWAITING_STEPS:
            return False
        following = [*self._queue.admitting.values(), self._next_admitted()]
        return any(
            group is not None and group.request.priority <= priority and self._is_short(self._uncached(group))
            for group in following
        )

    def _is_short(self, tokens: int) -> bool:
        return tokens <= self._queue.limits.long_prefill_token_threshold

    def _uncached(self, group: Group) -> int:
        return group.common - self._claims.cached_tokens(group)


def _priority(cursor: Cursor) -> int:
    return cursor.sequence.group.request.priority


def divided(wanted: list[int], budget: int, parts: int) -> list[int]:
    """Divide a budget: the first `parts` that want more receive equal parts, again and again, until none is left."""
    given = [0] * len(wanted)
    served = 0  # the prompts before it have all that they want
    while budget > 0 and served < len(wanted):
        sharing = [index for index in range(served, len(wanted)) if given[index] < wanted[index]][:parts]
        part = max(1, budget // max(1, len(sharing)))
        for index in sharing:
            more = min(part, wanted[index] - given[index], budget)
            given[index] += more
            budget -= more
        while served < len(wanted) and given[served] == wanted[served]:
            served += 1
    return given
