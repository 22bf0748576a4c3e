"""Plans a step while the one before it is in flight, and keeps of it what still holds afterwards.

Only the tokens that the step in flight samples are not known yet: work that needs more of its results sits out.
"""

from collections.abc import Mapping

from engine.schedule.endings import RequestEndings
from engine.schedule.planning.prefill_order import PrefillOrder
from engine.schedule.planning.step_work import (
    Cursor,
    awaits_results,
    list_gangs,
    token_counts,
    work_after,
    work_of,
)
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import PENDING_TOKEN, StepPlan, Work


class StepsAhead:
    """Plans steps ahead. `counts_tokens`: the sampler counts tokens for penalties."""

    def __init__(
        self,
        queue: RequestQueue,
        view: PoolView,
        prefill: PrefillOrder,
        endings: RequestEndings,
        *,
        counts_tokens: bool,
    ) -> None:
        self._queue = queue
        self._view = view
        self._prefill = prefill
        self._endings = endings
        self._counts_tokens = counts_tokens

    def work_after(self, plan: StepPlan) -> list[Work]:
        """Return the work of the step after `plan`, which is in flight. Sequences do not change until it is adopted.

        Returns none if the results of `plan` must be known first, or if waiting would let more sequences take part.
        """
        if self._queue.holds_isolated:
            return []
        try:
            return self._work_ahead({work.sequence: work for work in plan.work}) or []
        except Exception:  # the next plan fails the request: it also takes part in the step in flight
            return []

    def still_valid(self, ahead: StepPlan) -> StepPlan:
        """Return the part of a plan that holds after the step before it.

        Work of sequences that ended or were preempted meanwhile is dropped; its results are discarded.
        """
        valid = tuple(filter(self._is_valid, ahead.work))
        return ahead if len(valid) == len(ahead.work) else StepPlan(ahead.step, ahead.copies, valid)

    def _work_ahead(self, in_flight: Mapping[int, Work]) -> list[Work] | None:
        """Return the work of the groups that can run ahead; those that need results sit out.

        A group that sits out is not in flight afterwards, so that it takes part in the next step. None if more
        sequences would sit out than run: each of them misses a step, which costs more than a pause between two steps.
        """
        work: list[Work] = []
        others: list[Group] = []
        sitting_out = 0
        for group in self._queue.running:
            sequence = group.members[0]
            before = in_flight.get(sequence.id)
            if awaits_results(group, in_flight, counts_tokens=self._counts_tokens):
                sitting_out += len(group.live)
                continue
            if before is None or not before.samples or len(group.members) > 1 or not group.forked:
                others.append(group)
            elif len(sequence.tokens) + 1 < group.request.longest:  # else it ends with the token in flight
                if before.end >= sequence.room:
                    return None
                work.append(work_after(sequence, before))
        budget = self._queue.limits.token_budget - len(work)
        gangs, prompts = list_gangs(others, in_flight)
        if any(cursor.lacks_room for gang in [*gangs, prompts] for cursor in gang):
            return None
        for gang in gangs:
            fed = token_counts(gang, budget)
            budget -= sum(fed)
            work += [work_of(cursor, count) for cursor, count in zip(gang, fed, strict=False)]
        given = self._prefill.divide(prompts, budget)
        work += [work_of(cursor, tokens) for cursor, tokens in zip(prompts, given, strict=True) if tokens]
        if sitting_out > len(work):
            return None
        self._queue.totals.count_ahead(len(work), sitting_out)
        return work

    def _is_valid(self, work: Work) -> bool:
        """Return whether a sequence still needs work planned ahead, after the step before it."""
        sequence = self._queue.find(work.sequence)
        if sequence is None or sequence.computed != work.start or not self._queue.runs(sequence.group):
            return False
        if sequence.release_pending or not sequence.table or (sequence.finish is not None and sequence.group.forked):
            return False
        if not self._covers(work, sequence):
            return False
        if work.token_ids is not PENDING_TOKEN:
            return self._has_tokens(sequence, work)
        if not sequence.group.forked or len(sequence.tokens) != work.start + 1:
            return False
        return not sequence.group.request.has_rules or self._has_rules(sequence, work)

    def _covers(self, work: Work, sequence: Sequence) -> bool:
        """Return whether work planned ahead uses the blocks that its sequence has now."""
        if work.block_table is sequence.table and work.window_tables is sequence.window_tables:
            return True
        covered = self._view.blocks_for(work.end)
        if work.block_table[:covered] != sequence.table[:covered]:
            return False
        # Blocks that have left a window meanwhile are not read: the work begins behind them.
        return all(
            own in (then, 0)
            for table, now in zip(work.window_tables, sequence.window_tables, strict=True)
            for then, own in zip(table[:covered], now[:covered], strict=True)
        )

    def _has_tokens(self, sequence: Sequence, work: Work) -> bool:
        """Return whether work planned ahead, whose tokens were known, is what would be planned now."""
        try:
            known = work_of(Cursor(sequence, work.start, 0), len(work.token_ids))
        except Exception as fault:
            self._endings.record_fault(sequence.group, fault)
            return False
        return known._replace(block_table=work.block_table, window_tables=work.window_tables) == work

    def _has_rules(self, sequence: Sequence, work: Work) -> bool:
        """Return whether the rules of work planned ahead hold now that the token before it is known."""
        try:
            return sequence.rules_at(work.start + 1, counted=True) == work.rules
        except Exception as fault:
            self._endings.record_fault(sequence.group, fault)
            return False
