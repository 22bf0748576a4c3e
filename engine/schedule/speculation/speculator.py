"""Adds proposed tokens to the work of a step, and counts how many of them were accepted.

A proposed token is computed behind the last known one, and the step samples at each position. Noise is a function of
the position (engine.run.sampling), so each sample is the token that a step without proposals would give, as long as the
tokens before it are right. The first sample that differs from the proposed token is itself right.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from engine.schedule.request import Request
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.speculation.acceptance import AcceptanceRates
from engine.schedule.speculation.ngram_index import Draft, NgramIndex
from engine.schedule.speculation.speculation_costs import SpeculationCosts
from engine.schedule.step_plan import RowRules, StepPlan, Work

# Why a request gets no proposals: its next token depends on the ones before by more than their K and V.
BEAM_SEARCH, PENALTIES, GUIDED = EXCLUSIONS = ("beam_search", "penalties", "guided")


def exclusion_of(request: Request) -> str | None:
    """Return why a request gets no proposals, None if it may get some."""
    if request.beam_search is not None:
        return BEAM_SEARCH
    if request.constraint is not None:
        return GUIDED
    return PENALTIES if request.logit_rules.penalizes else None


@dataclass
class _Drafter:
    """The n-grams of one sequence, how its drafts fared, and the match of the latest one."""

    index: NgramIndex
    rates: AcceptanceRates
    match: int = 0


class _Found(NamedTuple):
    """A draft for the work at a place of the step."""

    place: int
    sequence: Sequence
    drafter: _Drafter
    draft: Draft


class Speculator:
    """Proposes tokens for decoding sequences. Only steps without prompts have proposals: others are not compared."""

    def __init__(self, queue: RequestQueue) -> None:
        self.costs = SpeculationCosts()
        self._queue = queue
        self._most = queue.limits.proposed_tokens
        self._rates = AcceptanceRates()  # of all sequences
        self._drafters: dict[int, _Drafter] = {}  # by sequence
        self._sweep_at = 2 * queue.limits.max_sequences  # drafters

    def count_request(self, request: Request) -> None:
        """Count a started request, if it gets no proposals."""
        if (reason := exclusion_of(request)) is not None:
            self._queue.totals.count_unspeculated(reason)

    def propose(self, work: list[Work], on_fault: Callable[[Group, Exception], None]) -> list[Work]:
        """Return the work of a step with proposed tokens, within the token budget and the room of each sequence.

        `on_fault` receives an exception raised for one request.
        """
        if not all(map(_is_decoding, work)) or not self._may_pay(work):
            return work
        found: list[_Found] = []
        for place, item in enumerate(work):
            try:
                found += self._find(place, item)
            except Exception as fault:
                on_fault(self._queue.sequence(item.sequence).group, fault)
        if not found:
            return work
        work = list(work)
        for one, count in zip(found, self._select(work, found), strict=True):
            if count:
                work[one.place] = _with_proposed(work[one.place], one.sequence, one.draft.token_ids[:count])
            else:
                one.drafter.rates.forget(one.draft.match)
            self._queue.totals.count_declined(len(one.draft.token_ids) - count)
        return work

    def count(self, work: Work, accepted: int) -> None:
        """Count the accepted tokens of a sequence's work."""
        self._queue.totals.count_draft(work.proposed, accepted)
        drafter = self._drafters[work.sequence]
        for rates in (drafter.rates, self._rates):
            rates.count(drafter.match, accepted, work.proposed)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Count the duration of a step, if it decoded only."""
        if plan.work and all(map(_is_decoding, plan.work)):
            proposed = sum([item.proposed for item in plan.work])
            self.costs.observe(len(plan.work), proposed, seconds, random=_is_random(plan.work))

    def _may_pay(self, work: list[Work]) -> bool:
        """Return whether any token may be proposed: most steps of a large batch need no search."""
        drafters = [self._drafters.get(item.sequence) for item in work]
        most = max([self._rates.most(), *(one.rates.most() for one in drafters if one is not None)])
        return self.costs.may_pay(len(work), most, random=_is_random(work))

    def _find(self, place: int, work: Work) -> list[_Found]:
        """Return the draft for the work at a place, if there is one."""
        sequence = self._queue.sequence(work.sequence)
        group = sequence.group
        if not group.forked or exclusion_of(group.request) is not None:
            return []
        # After the last token nothing is computed, so one of the remaining tokens is never proposed.
        most = min(self._most, sequence.room - work.end, group.request.longest - len(sequence.tokens) - 1)
        if most <= 0:
            return []
        drafter = self._drafter(sequence)
        draft = drafter.index.draft(sequence.tokens, most)
        if draft is None:
            return []
        drafter.match = draft.match
        return [_Found(place, sequence, drafter, draft)]

    def _drafter(self, sequence: Sequence) -> _Drafter:
        if sequence.id not in self._drafters:
            self._sweep()
            index = NgramIndex(sequence.group.request.longest, self._queue.limits.matched_tokens)
            self._drafters[sequence.id] = _Drafter(index, self._rates.for_sequence())
        return self._drafters[sequence.id]

    def _sweep(self) -> None:
        """Drop the drafters of ended sequences, when there are twice as many as after the last time."""
        if len(self._drafters) >= self._sweep_at:
            self._drafters = {one: kept for one, kept in self._drafters.items() if self._queue.find(one) is not None}
            self._sweep_at = 2 * max(len(self._drafters), self._queue.limits.max_sequences)

    def _select(self, work: list[Work], found: Items[_Found]) -> list[int]:
        """Return how many tokens of each draft to propose."""
        chances = [
            (-chance, row)
            for row, one in enumerate(found)
            for chance in one.drafter.rates.chances(one.draft.match, len(one.draft.token_ids))
        ]
        chances.sort()
        del chances[max(0, self._queue.limits.token_budget - len(work)) :]
        taken = self.costs.choose(len(work), [-chance for chance, _ in chances], random=_is_random(work))
        proposed = [0] * len(found)
        for _, row in chances[:taken]:
            proposed[row] += 1
        return proposed


def _is_decoding(work: Work) -> bool:
    return work.samples and len(work.token_ids) - work.proposed == 1


def _is_random(work: Items[Work]) -> bool:
    return any(not item.sampling.greedy for item in work)


def _with_proposed(work: Work, sequence: Sequence, proposed: tuple[int, ...]) -> Work:
    later: tuple[RowRules | None, ...] = ()
    if sequence.group.request.has_rules:
        tokens = [*sequence.tokens, *proposed]
        later = tuple(sequence.rules_at(end, tokens) for end in range(work.end + 1, work.end + 1 + len(proposed)))
    return work._replace(token_ids=work.token_ids + proposed, proposed=len(proposed), later_rules=later)
