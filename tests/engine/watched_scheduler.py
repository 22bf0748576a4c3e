"""A scheduler that checks its invariants at each call; the only test code that accesses its internals."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import kvmanager
from blocks import FreeReason, Step, StepItem, StepResult
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Finished, Started
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.scheduler import IdleReason, Scheduler
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.speculation.speculation_costs import SpeculationCosts
from engine.schedule.step_plan import PENDING, StepPlan, Work


class EveryProposalPays(SpeculationCosts):
    """Takes all proposals, from the first step on."""

    def may_pay(self, sequences: int, chance: float, *, random: bool = False) -> bool:
        return True

    def choose(self, sequences: int, chances: Items[float], *, random: bool = False) -> int:
        return len(chances)


class WatchedScheduler(Scheduler):
    """Checks plans, victims, admissions, states, and its view against the pool."""

    def __init__(
        self, capacity: Capacity, limits: Limits, costs: PreemptionCosts | None = None, *, ahead: bool = False
    ) -> None:
        super().__init__(capacity, limits, costs, ahead=ahead)
        if self._speculator:
            self._speculator.costs = EveryProposalPays()
        self.adopted_work = self.dropped_work = 0
        self._expected: dict[int, int] = {}  # blocks that groups of the Step in flight are expected to hit
        self.pool: Callable[[], kvmanager.Pool] = lambda: kvmanager.Pool(
            kvmanager.PoolSpec("no engine", 1, "", capacity.block_size, capacity.device_blocks)
        )

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan:
            self._check_plan(plan)
        self._check_states()
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        ahead = super().plan_ahead(plan)
        if ahead:
            ends = {work.sequence: work.end for work in plan.work}
            for work in ahead.work:
                sequence = self._queue.sequence(work.sequence)
                assert work.start == ends.get(work.sequence, sequence.computed)
                assert work.end <= sequence.room, "no work beyond room"
            decoding = [work for work in ahead.work if work.token_ids == (PENDING,)]
            assert all(work.sequence in ends for work in decoding)
            self._check_only_holders(ahead)
        return ahead

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        plan = super().adopt(ahead, now)
        self._check_work(plan)
        self._check_states()
        self.adopted_work += len(plan.work)
        self.dropped_work += len(ahead.work) - len(plan.work)
        planned = {work.sequence for work in plan.work}
        for work in ahead.work:
            sequence = self._queue.find(work.sequence)
            if sequence and sequence.finish is None and sequence.group in self._queue.running:
                changed = sequence.release_pending or sequence.computed != work.start or not sequence.group.forked
                assert changed or work.sequence in planned, "work of an unchanged sequence is adopted"
        return plan

    def idle_reason(self, *, connected: bool) -> IdleReason | None:
        reason = super().idle_reason(connected=connected)
        alone = any(group.isolated for group in self._queue.running)
        for group in self._queue.running if reason and not alone else ():
            rooms = [sequence.room > sequence.computed for sequence in group.active]
            assert not any(rooms) or not all(rooms), "a loop sleeps only if no group can be computed"
            assert not group.ready_to_fork or reason is not IdleReason.EMPTY
        return reason

    def build_step(self, plan: StepPlan | None) -> Step | None:
        computed = [one for one in self._queue.running if one.request.prefill_only and one.ready_to_fork]
        running = [one for one in self._queue.running if one not in computed]
        waiting = list(self._queue.waiting)
        in_flight = self.step_in_flight
        step = super().build_step(plan)
        assert not (in_flight and step), "one Step at a time"
        if step:
            self._check_victims(running, step, plan)
            self._check_admissions(waiting, step)
            admitting = self._queue.admitting
            self._expected = {
                one.group: len(self._view.claims.cached_blocks(admitting[one.group])) for one in step.allocates
            }
            assert len({extend.group for extend in step.extends}) == len(step.extends), "one extend for a group"
        self._check_states()
        return step

    def apply(self, result: StepResult) -> None:
        step = self._blocks._pending
        super().apply(result)
        assert step
        self._check_refusals(step, result)
        self._check_view()
        self._check_lookahead()
        self._check_states()

    def live(self) -> list[str]:
        """Ids of the requests that have not ended, without those of pins."""
        return [name for name, group in self._queue.by_request.items() if not group.request.prefill_only]

    def unpublished_ends(self) -> list[str]:
        """Ids of the ended requests whose end the next turn publishes."""
        return [output.request_id for output in self._outputs._pending if isinstance(output, Finished)]

    def _check_plan(self, plan: StepPlan) -> None:
        self._check_work(plan)
        fed = sum(len(work.token_ids) for work in plan.work)
        self._check_no_ready_sequence_is_left_out(plan, self.limits.token_budget - fed)

    def _check_work(self, plan: StepPlan) -> None:
        size, budget = self.capacity.block_size, self.limits.token_budget
        fed = sum(len(work.token_ids) for work in plan.work)
        assert fed <= budget
        assert len({work.sequence for work in plan.work}) == len(plan.work)
        for work in plan.work:
            sequence = self._queue.sequence(work.sequence)
            assert sequence.group in self._queue.running
            assert sequence.finish is None or sequence is sequence.group.trunk
            assert work.start == sequence.computed
            if work.token_ids != (PENDING,):  # else the step before has sampled the token, and it stays on the device
                known = work.token_ids[: len(work.token_ids) - work.proposed]
                assert list(known) == sequence.tokens[work.start : work.least_end]
            assert work.token_ids
            assert work.end <= sequence.room <= len(sequence.table) * size, "no work beyond room"
            covered = -(-work.end // size)
            assert work.block_table[:covered] == sequence.table[:covered]
            self._check_samples(sequence, work, plan)
        self._check_only_holders(plan)
        groups = {self._queue.sequence(work.sequence).group for work in plan.work}
        isolated = [group.request.request_id for group in groups if group.isolated]
        assert not isolated or len(groups) == 1, "an isolated group is alone in its batch"
        unpublished = {output.request_id for output in self._outputs._pending if isinstance(output, Started)}
        assert unpublished.isdisjoint(isolated), "an isolated group is computed after its start is published"

    def _check_samples(self, sequence: Sequence, work: Work, plan: StepPlan) -> None:
        group = sequence.group
        if group.forked:
            assert work.samples == (work.least_end == len(sequence.tokens))
            assert work.sample_indices == ((sequence.index,) if work.samples else ())
            if group.beams and work.samples:
                live = {beam.id for beam in group.live}
                assert live <= {work.sequence for work in plan.work}, "the beams of a search decode together"
        else:
            assert work.end <= group.common, "the trunk computes only the common tokens"
            fresh = [member.index for member in group.live if len(member.tokens) == work.end == group.common]
            assert list(work.sample_indices) == (fresh if group.request.generates else [])
            for member in group.live:
                assert member.tokens[: work.end] == sequence.tokens[: work.end]

    def _check_only_holders(self, plan: StepPlan) -> None:
        size = self.capacity.block_size
        written = [block for work in plan.work for block in work.block_table[work.start // size : -(-work.end // size)]]
        holders = [member.table for group in self._queue.running for member in group.members]
        for block in written:
            assert sum(block in table for table in holders) == 1, "a block is written by its only holder"

    def _check_no_ready_sequence_is_left_out(self, plan: StepPlan, budget_left: int) -> None:
        planned = {work.sequence for work in plan.work}
        groups = {self._queue.sequence(number).group for number in planned}
        # A step of copies alone is one whose isolated group waits for the fork of its beams.
        isolated = any(group.isolated for group in groups or self._queue.running)
        for group in self._queue.running:
            if group not in groups and (isolated or group.isolated):
                continue
            behind = [sequence for sequence in group.active if sequence.uncomputed_tokens > 1]
            gangs = [[sequence] for sequence in behind] or ([group.active] if group.active else [])
            for gang in gangs:
                able = all(sequence.room > sequence.computed for sequence in gang)
                taken = [sequence.id in planned for sequence in gang]
                assert len(set(taken)) == 1, "the samples of a request decode together"
                left = taken[0] or not able or budget_left < len(gang)
                assert left or self._prefill.limited, "a sequence with room and budget is planned"

    def _check_states(self) -> None:
        queue = self._queue
        groups = (queue.waiting, queue.running, list(queue.admitting.values()))
        for group in queue.by_request.values():
            assert not group.ended
            assert sum(group in state for state in groups) == 1, "waiting, running or admitting"
        ended = [group for state in groups for group in state if group.ended]
        assert all(group in groups[2] for group in ended), "only a Step in flight keeps an ended group"
        for state in groups[:2]:
            keys = [group.key for group in state]
            assert keys == sorted(keys)
        assert sum(group.isolated for state in groups[1:] for group in state) <= 1, "one at a time"
        assert queue._queued_tokens.keys() == set(queue.waiting)
        assert queue._all_queued_tokens == sum(queue._queued_tokens.values())
        assert 0 <= self.uncomputed_tokens <= sum(len(one.tokens) for one in queue._by_id.values())
        for group in queue.waiting:
            on_device = [member for member in group.members if member.table and not member.swapped]
            assert not on_device or group.id in self._blocks._victims.swapping_out, (
                "a waiting group holds no device block"
            )
        holding = [group for state in groups[1:] for group in state]
        widths = [max(one.width, len(one.live)) if one.request.generates else 1 for one in holding]
        assert sum(widths) <= self.limits.max_sequences

    def _check_victims(self, running: list[Group], step: Step, plan: StepPlan | None) -> None:
        ends = {work.sequence: work.least_end for work in plan.work} if plan else {}
        preempted = [free for free in step.frees if free.reason is FreeReason.PREEMPTED]
        swapped = set(step.swap_outs)
        while preempted or swapped:
            victim = running.pop()
            assert victim in self._queue.waiting
            if victim.id in swapped:
                swapped.remove(victim.id)
                continue
            frees = [free for free in preempted if free.sequence in {member.id for member in victim.members}]
            assert frees, "the victim has the largest key of those that run"
            (blocked,) = (group for group in running if group.id == frees[0].preempted_for_group)
            assert blocked.key < victim.key, "a group preempts only larger keys"
            short = [sequence.room <= ends.get(sequence.id, sequence.computed) for sequence in blocked.active]
            assert any(short), "no group is preempted for lookahead"
            assert not any(member.table for member in victim.members), "a group is preempted as a whole"
            preempted = [free for free in preempted if free not in frees]
        assert running == self._queue.running

    def _check_admissions(self, waiting: list[Group], step: Step) -> None:
        numbers = [*step.swap_ins, *(allocate.group for allocate in step.allocates)]
        admitting = [self._queue.admitting[number] for number in numbers]
        for index, group in enumerate(waiting):
            if group not in admitting and any(later in admitting for later in waiting[index + 1 :]):
                busy = [*self._queue.running, *self._queue.admitting.values()]
                computed = any(self._computes_prefix_of(group, other) for other in busy)
                one_at_a_time = group.isolated and any(other.isolated for other in busy)
                later = [other for other in waiting[index + 1 :] if other in admitting]
                passed = self._is_long(group) and not any(map(self._is_long, later))
                assert computed or one_at_a_time or passed, "overtaken without a reason"

    def _is_long(self, group: Group) -> bool:
        uncached = group.common - self._view.claims.cached_tokens(group)
        return 0 < self.limits.long_prefill_token_threshold < uncached

    def _computes_prefix_of(self, waiting: Group, other: Group) -> bool:
        if waiting.salt != other.salt:
            return False
        size = self.capacity.block_size
        own, others = waiting.trunk_tokens, other.trunk.tokens
        shareable = min((len(own) - 1) // size, len(others) // size)
        common = sum(own[: end * size] == others[: end * size] for end in range(1, shareable + 1))
        if common <= other.trunk.committed:
            return False
        return other.key < waiting.key or other.request.priority == waiting.request.priority

    def _check_refusals(self, step: Step, result: StepResult) -> None:
        # The scheduler does not know yet which blocks an audit withheld, so any pin may be refused.
        refused = [(one.item, one.position) for one in result.refusals if one.item is not StepItem.PIN]
        last = (StepItem.ALLOCATE, len(step.allocates) - 1)
        cached = {change.sequence: (change.cached_tokens or 0) // self.capacity.block_size for change in result.tables}
        found = {one.group: cached.get(one.sequence, self._expected[one.group]) for one in step.allocates}
        assert set(refused) <= {last} or found != self._expected, "only the last allocate may be refused"

    def _check_view(self) -> None:
        pool = self.pool()
        holders = {sequence.id: sequence for sequence in self._holders()}
        assert pool.sequences.keys() == holders.keys()
        for number, held in pool.sequences.items():
            own = holders[number]
            assert (list(own.table), own.room, own.swapped) == (held.table, held.room_tokens, held.swapped)
            assert own.committed == held.committed_blocks or own.finish is not None
        view = self._view
        assert (view.available, view.available_host) == (pool.device.available, pool.host.available)
        self._check_pins(pool)

    def _check_lookahead(self) -> None:
        """Check the blocks of decoding sequences beyond their next token."""
        size, proposed = self.capacity.block_size, self.limits.proposed_tokens
        for group in self._queue.running:
            for member in group.members if group.forked and not group.beams else ():
                next_token = -(-(len(member.tokens) + 1) // size)
                assert len(member.table) <= next_token + -(-proposed // size) + 1
                if member.finish is None:
                    assert len(member.table) <= -(-member.max_slots // size), "no block that is never needed"

    def _check_pins(self, pool: kvmanager.Pool) -> None:
        pinned = {pin.name: list(pin.blocks) for pin in self.pins.list_pins() if pin.pinned}
        unpinning = {pin.name: list(pin.blocks) for pin in self.pins._unpins if pin.pinned}
        assert not pinned.keys() & unpinning.keys()
        assert pinned | unpinning == pool.state.pins
        assert self.capacity.unpinned_blocks >= 0
        for group in self._queue.by_request.values():
            if not group.request.prefill_only:
                assert self.capacity.max_blocks(group.request) <= self.capacity.unpinned_blocks

    def _holders(self) -> Iterable[Sequence]:
        groups = [*self._queue.running, *self._queue.waiting, *self._queue.admitting.values()]
        holding = (
            member for group in groups for member in group.members if member.table and not member.release_pending
        )
        return [*holding, *(sequence for sequence, _ in self._releases._pending)]

    def check_idle(self) -> None:
        """Check that no state of ended requests is left."""
        queue = self._queue
        assert self.empty
        assert not queue._by_id
        assert self.uncomputed_tokens == 0
        assert [queue.waiting, queue.running, queue.admitting, list(self._blocks._copies)] == [[], [], {}, []]
        assert not self._view.claims._owners
        assert not self._view.claims._awaited
        assert len(self._view.claims.cached) <= self.capacity.device_blocks
        assert self._view.available == self.capacity.unpinned_blocks
        assert self._view.available_host == self.capacity.host_blocks
        assert not +self._view._host_holders
        pinned = Counter(block for pin in self.pins.list_pins() for block in pin.blocks)
        assert +self._view._holders == pinned
        assert all(pin.pinned for pin in self.pins.list_pins())
