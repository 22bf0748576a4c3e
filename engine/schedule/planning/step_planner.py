"""Selects the sequences of the next step.

The live samples of a request are gang-scheduled: all of them take part in a step, or none.
"""

from collections.abc import Mapping

from engine.schedule.endings import RequestEndings
from engine.schedule.isolated_requests import IsolatedRequests
from engine.schedule.live_requests import LiveRequests
from engine.schedule.planning.prefill_order import PrefillOrder
from engine.schedule.planning.step_work import (
    Cursor,
    awaits_results,
    decoding_alone,
    decoding_work,
    list_gangs,
    token_counts,
    work_after,
    work_of,
)
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.speculation.speculator import Speculator
from engine.schedule.step_plan import PENDING_TOKEN, StepPlan, Work


class StepPlanner:
    """Plans steps among the groups that have blocks. `now` is the time of the latest plan."""

    def __init__(
        self,
        queue: RequestQueue,
        view: PoolView,
        blocks: BlockPlanner,
        isolation: IsolatedRequests,
        requests: LiveRequests,
        endings: RequestEndings,
        speculator: Speculator | None = None,
        *,
        counts_tokens: bool = False,
    ) -> None:
        self.now = 0.0
        self._speculator = speculator
        self._counts_tokens = counts_tokens
        self._queue = queue
        self._view = view
        self._blocks = blocks
        self.prefill = PrefillOrder(queue, view.claims, lambda: blocks.next_admitted)
        self._isolation = isolation
        self._requests = requests
        self._endings = endings

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        self._begin_step(now)
        work: list[Work] = []
        others: list[Group] = []
        for group in self._isolation.batch(now, step_in_flight=self._blocks.in_flight):
            if (sequence := decoding_alone(group)) is None:
                others.append(group)
            elif sequence.computed < sequence.room:
                self._add_decoding(work, sequence)
            else:
                self._queue.totals.count_skipped(self._blocks.awaits_blocks(sequence))
        work += self._prefill_and_gangs(others, self._queue.limits.token_budget - len(work))
        if self._speculator is not None:
            work = self._speculator.propose(work, self._endings.record_fault)
        if self._endings.fail_faulty():
            return self.plan(now)  # again, without the failed groups
        if not work and not self._blocks.has_copies:
            return None
        return self._planned(StepPlan(self._queue.totals.steps + 1, self._blocks.take_copies(), tuple(work)))

    def _prefill_and_gangs(self, others: list[Group], budget: int) -> list[Work]:
        """Return the work of decoding samples of groups, and of prompts in prefill."""
        work: list[Work] = []
        gangs, prompts = list_gangs(others, {})
        for gang in gangs:
            if fed := token_counts(gang, budget):
                budget -= sum(fed)
                work += self._works(gang, fed)
            elif budget > 0:
                self._queue.totals.count_skipped(sum(self._blocks.awaits_blocks(cursor.sequence) for cursor in gang))
        for cursor, tokens in zip(prompts, self.prefill.divide(prompts, budget), strict=True):
            if tokens:
                work += self._works([cursor], [tokens])
            elif budget > 0 and cursor.start >= cursor.sequence.room:
                self._queue.totals.count_skipped(self._blocks.awaits_blocks(cursor.sequence))
        return work

    def can_compute(self) -> bool:
        """Return whether the next step would make copies, or compute a token."""
        if self._blocks.has_copies:
            return True
        groups = self._isolation.batch(self.now, step_in_flight=self._blocks.in_flight)
        budget = self._queue.limits.token_budget
        gangs, prompts = list_gangs(groups, {})
        return any(token_counts(gang, budget) for gang in [*gangs, *([cursor] for cursor in prompts)])

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight. Sequences do not change until `adopt`.

        Returns None if the results of `plan` must be known first, or if waiting would let more sequences take part.
        """
        if self._queue.holds_isolated:
            return None
        try:
            work = self._work_ahead({work.sequence: work for work in plan.work})
        except Exception:  # the next plan fails the request: it also takes part in the step in flight
            return None
        return StepPlan(plan.step + 1, self._blocks.take_copies(), tuple(work)) if work else None

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
        if any(cursor.start >= cursor.sequence.room for gang in [*gangs, prompts] for cursor in gang):
            return None
        for gang in gangs:
            fed = token_counts(gang, budget)
            budget -= sum(fed)
            work += [work_of(cursor, count) for cursor, count in zip(gang, fed, strict=False)]
        given = self.prefill.divide(prompts, budget)
        work += [work_of(cursor, tokens) for cursor, tokens in zip(prompts, given, strict=True) if tokens]
        if sitting_out > len(work):
            return None
        self._queue.totals.count_ahead(len(work), sitting_out)
        return work

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return the valid part of a step planned ahead, after the tokens before it were sampled.

        Work of sequences that ended or were preempted meanwhile is dropped; its results are discarded.
        """
        self._begin_step(now)
        valid = tuple(filter(self._is_valid, ahead.work))
        if self._endings.fail_faulty():
            return self.adopt(ahead, now)
        return self._planned(ahead if len(valid) == len(ahead.work) else StepPlan(ahead.step, ahead.copies, valid))

    def _begin_step(self, now: float) -> None:
        self.now = now
        self._requests.fail_expired(now)

    def _planned(self, plan: StepPlan) -> StepPlan:
        self._queue.totals.count_step(plan.step, len(plan.work))
        for work in plan.work:
            if work.token_ids is not PENDING_TOKEN:  # else it takes part in the step before, too
                stats = self._queue.sequence(work.sequence).group.stats
                if stats.scheduled_at is None:
                    stats.schedule(self.now)
        return plan

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
            known = self._works([Cursor(sequence, work.start, 0)], [len(work.token_ids)])
            return (
                bool(known)
                and known[0]._replace(block_table=work.block_table, window_tables=work.window_tables) == work
            )
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

    def _has_rules(self, sequence: Sequence, work: Work) -> bool:
        """Return whether the rules of work planned ahead hold now that the token before it is known."""
        try:
            return sequence.rules_at(work.start + 1, counted=True) == work.rules
        except Exception as fault:
            self._endings.record_fault(sequence.group, fault)
            return False

    def _add_decoding(self, work: list[Work], sequence: Sequence) -> None:
        try:
            work.append(decoding_work(sequence))
        except Exception as fault:
            self._endings.record_fault(sequence.group, fault)

    def _works(self, gang: list[Cursor], fed: list[int]) -> list[Work]:
        """Return the work of a gang; if an exception is raised for its request, record it and return none."""
        try:
            return [work_of(cursor, count) for cursor, count in zip(gang, fed, strict=False)]
        except Exception as fault:
            self._endings.record_fault(gang[0].sequence.group, fault)
            return []
