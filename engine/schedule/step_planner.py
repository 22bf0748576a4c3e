"""Selects the sequences of the next step.

The live samples of a request are gang-scheduled: all of them take part in a step, or none.
"""

from engine.schedule.endings import RequestEndings
from engine.schedule.isolated_requests import IsolatedRequests
from engine.schedule.live_requests import LiveRequests
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request_queue import RequestQueue
from engine.schedule.step_plan import StepPlan, Work
from engine.schedule.step_work import Cursor, can_run_ahead, list_gangs, token_counts, work_of


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
    ) -> None:
        self.now = 0.0
        self._queue = queue
        self._view = view
        self._blocks = blocks
        self._isolation = isolation
        self._requests = requests
        self._endings = endings

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        self._begin_step(now)
        budget = self._queue.limits.token_budget
        work: list[Work] = []
        for gang in list_gangs(self._isolation.batch(now, step_in_flight=self._blocks.in_flight), {}):
            if fed := token_counts(gang, budget):
                budget -= sum(fed)
                work += self._works(gang, fed)
            elif budget > 0:
                self._queue.totals.count_skipped(sum(self._blocks.awaits_blocks(cursor.sequence) for cursor in gang))
        if self._endings.fail_faulty():
            return self.plan(now)  # again, without the failed groups
        if not work and not self._blocks.has_copies:
            return None
        return self._planned(StepPlan(self._queue.totals.steps + 1, self._blocks.take_copies(), tuple(work)))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight. Sequences do not change until `adopt`.

        Returns None if the tokens of `plan` must be known first, or if waiting would let more sequences take part.
        """
        in_flight = {work.sequence: work for work in plan.work}
        groups = (self._queue.sequence(number).group for number in in_flight)
        if self._queue.holds_isolated or not all(map(can_run_ahead, groups)):
            return None
        budget, size = self._queue.limits.token_budget, self._view.block_size
        work: list[Work] = []
        for gang in list_gangs(self._queue.running, in_flight):
            fed = token_counts(gang, budget)
            if not fed and any(cursor.start >= cursor.sequence.room for cursor in gang):
                return None
            budget -= sum(fed)
            try:
                work += [work_of(cursor, count, size) for cursor, count in zip(gang, fed, strict=False)]
            except Exception:  # the next plan fails it: it also takes part in the step in flight
                return None
        return StepPlan(plan.step + 1, self._blocks.take_copies(), tuple(work)) if work else None

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return the valid part of a step planned ahead, after the tokens before it were sampled.

        Work of sequences that ended or were preempted meanwhile is dropped; its results are discarded.
        """
        self._begin_step(now)
        known = [self._still_valid(work) for work in ahead.work]
        if self._endings.fail_faulty():
            return self.adopt(ahead, now)
        return self._planned(StepPlan(ahead.step, ahead.copies, tuple(work for work in known if work is not None)))

    def _begin_step(self, now: float) -> None:
        self.now = now
        self._requests.fail_expired(now)

    def _planned(self, plan: StepPlan) -> StepPlan:
        self._queue.totals.count_step(plan.step, len(plan.work))
        for work in plan.work:
            stats = self._queue.sequence(work.sequence).group.stats
            if stats.scheduled_at is None:
                stats.schedule(self.now)
        return plan

    def _still_valid(self, work: Work) -> Work | None:
        """Return the work with its tokens filled in, or None if the sequence no longer needs it."""
        sequence = self._queue.find(work.sequence)
        if sequence is None or sequence.group not in self._queue.running or sequence.release_pending:
            return None
        needless = sequence.finish is not None and sequence.group.forked
        if needless or not sequence.table or sequence.computed != work.start:
            return None
        known = self._works([Cursor(sequence, work.start, 0)], [len(work.token_ids)])
        return known[0] if known and known[0]._replace(token_ids=work.token_ids) == work else None

    def _works(self, gang: list[Cursor], fed: list[int]) -> list[Work]:
        """Return the work of a gang; if an exception is raised for its request, record it and return none."""
        size = self._view.block_size
        try:
            return [work_of(cursor, count, size) for cursor, count in zip(gang, fed, strict=False)]
        except Exception as fault:
            self._endings.record_fault(gang[0].sequence.group, fault)
            return []
