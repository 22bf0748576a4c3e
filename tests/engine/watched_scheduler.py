"""A scheduler that checks its own laws at each move: the one place of the tests that looks inside it."""

from collections.abc import Callable, Iterable

import kvmanager
from engine.blocks import FreeReason, Step, StepItem, StepResult
from engine.plan import StepPlan
from engine.request import Capacity, Sequence
from engine.scheduler import Finished, Limits, Scheduler


class WatchedScheduler(Scheduler):
    """Checks plans, victims, admissions, states, and its mirror against the pool."""

    def __init__(self, capacity: Capacity, limits: Limits) -> None:
        super().__init__(capacity, limits)
        self.pool: Callable[[], kvmanager.Pool] = lambda: kvmanager.Pool(
            kvmanager.PoolSpec("nobody", 1, "", capacity.block_size, capacity.device_blocks)
        )
        self.victims = 0
        self.waited_for_prefix = 0

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan:
            self._check_plan(plan)
        self._check_states()
        return plan

    def ask(self, plan: StepPlan | None) -> Step | None:
        running, waiting = list(self._running), list(self._waiting)
        asking = self.asking
        step = super().ask(plan)
        assert not (asking and step), "one Step at a time"
        if step:
            self._check_victims(running, step, plan)
            self._check_admissions(waiting, step)
        self._check_states()
        return step

    def apply(self, result: StepResult) -> None:
        asked = self._asked
        super().apply(result)
        assert asked
        self._check_refusals_foreseen(asked, result)
        self._check_mirror()
        self._check_states()

    def live(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._by_request)

    def untold_ends(self) -> list[str]:
        """Ids of those whose end the next turn will tell."""
        return [output.request_id for output in self._outputs if isinstance(output, Finished)]

    # Laws.

    def _check_plan(self, plan: StepPlan) -> None:
        size, budget = self.capacity.block_size, self.limits.token_budget
        fed = sum(len(work.token_ids) for work in plan.work)
        assert fed <= budget
        assert len({work.sequence for work in plan.work}) == len(plan.work)
        planned = {work.sequence for work in plan.work}
        for work in plan.work:
            sequence = self._by_id[work.sequence]
            assert sequence in self._running
            assert work.start == sequence.computed
            assert list(work.token_ids) == sequence.tokens[work.start : work.end]
            assert work.token_ids
            assert work.end <= sequence.room <= len(sequence.table) * size, "no work beyond room"
            assert list(work.block_table) == sequence.table[: -(-work.end // size)]
            assert work.samples == (work.end == len(sequence.tokens))
        written = [block for work in plan.work for block in work.block_table[work.start // size :]]
        for block in written:
            holders = [sequence for sequence in self._running if block in sequence.table]
            assert len(holders) == 1, "a block is written by its only holder"
        for sequence in self._running:
            able = sequence.room > sequence.computed
            assert sequence.id in planned or not able or fed == budget, "who can take part does"

    def _check_states(self) -> None:
        groups = (self._waiting, self._running, list(self._admitting.values()))
        for sequence in self._by_request.values():
            assert sequence.finish is None
            assert sum(sequence in group for group in groups) == 1, "waiting, running or admitting"
        ended = [sequence for group in groups for sequence in group if sequence.finish is not None]
        assert all(sequence in groups[2] for sequence in ended), "only an answer under way keeps who has ended"
        for group in groups[:2]:
            keys = [sequence.key for sequence in group]
            assert keys == sorted(keys)
        assert len(self._running) + len(self._admitting) <= self.limits.max_sequences

    def _check_victims(self, running: list[Sequence], step: Step, plan: StepPlan | None) -> None:
        ends = {work.sequence: work.end for work in plan.work} if plan else {}
        for free in step.frees:
            if free.reason is not FreeReason.PREEMPTED:
                continue
            self.victims += 1
            victim = running.pop()
            needy = self._by_id[free.preempted_for_group]
            assert victim.id == free.sequence, "the victim is the largest that runs"
            assert needy.key < victim.key, "nobody preempts a smaller one"
            assert needy.room <= ends.get(needy.id, needy.computed), "nobody preempts for lookahead"
            assert victim in self._waiting
        assert running == self._running

    def _check_admissions(self, waiting: list[Sequence], step: Step) -> None:
        asked = [self._admitting[allocate.sequence] for allocate in step.allocates]
        assert [sequence.key for sequence in asked] == sorted(sequence.key for sequence in asked)
        for index, sequence in enumerate(waiting):
            overtaken = sequence not in asked and any(later in asked for later in waiting[index + 1 :])
            if overtaken:
                self.waited_for_prefix += 1
                busy = [*self._running, *self._admitting.values()]
                assert any(self._computes_prefix_of(sequence, other) for other in busy), "overtaken without a reason"

    def _computes_prefix_of(self, waiting: Sequence, other: Sequence) -> bool:
        if waiting.request.salt != other.request.salt:
            return False
        size = self.capacity.block_size
        shareable = (min(len(waiting.tokens), len(other.tokens)) - 1) // size
        common = sum(
            waiting.tokens[: end * size] == other.tokens[: end * size] for end in range(1, shareable + 1)
        )  # fmt: skip
        return common > other.committed

    def _check_refusals_foreseen(self, asked: Step, result: StepResult) -> None:
        refused = [(refusal.item, refusal.position) for refusal in result.refusals]
        last = (StepItem.ALLOCATE, len(asked.allocates) - 1)
        assert set(refused) <= {last}, "the count is exact: only the last of the queue may ask in vain"

    def _check_mirror(self) -> None:
        pool = self.pool()
        here = {sequence.id: sequence for sequence in self._holders()}
        assert pool.sequences.keys() == here.keys()
        for sequence, held in pool.sequences.items():
            ours = here[sequence]
            assert (ours.table, ours.room) == (held.table, held.room)
            assert ours.committed == held.committed or ours.finish is not None
        assert self._mirror.available == pool.device.available

    def _holders(self) -> Iterable[Sequence]:
        return [*self._running, *(sequence for sequence, _ in self._to_free)]

    def check_idle(self) -> None:
        """Nothing is left of requests that are over."""
        assert self.empty
        assert not self._by_id
        assert [self._waiting, self._running, self._admitting, self._copies] == [[], [], {}, []]
        assert not self._claims._owners
        assert not self._claims._claims
        assert self._mirror.available == self.capacity.device_blocks
        assert not +self._mirror._holders
