"""What the engine asks of the block manager: the Step that the turn after the next needs, and what its answer means.

At most one Step is under way, so the count of available blocks is exact when the next is made: a shortage is foreseen,
and the victim's free travels with the needy's extend.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from blocks import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Refusal,
    Step,
    StepItem,
    StepResult,
    TableChange,
)
from engine.errors import BlockManagerBroken
from engine.schedule.pins import Pins
from engine.schedule.preemption import Preemption, PreemptionCosts
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_builder import StepBuilder
from engine.schedule.step_plan import Copies, StepPlan, Work


class Admitted(NamedTuple):
    """A group that has blocks, and how many leading tokens were found in the cache; None: it was swapped in."""

    group: Group
    cached_tokens: int | None


class BlockPlanner:
    """Makes Steps, and takes their answers in."""

    def __init__(self, roster: RequestQueue, costs: PreemptionCosts, pins: Pins, lookahead_tokens: int) -> None:
        """Begin with nothing asked. Decoding asks so many tokens ahead of its next step.

        With one, an answer may take a whole step longer without delaying anybody.
        """
        self.copies: list[Copies] = []  # of answers, to be made before the next step
        self.deferred = 0  # groups that waited for another's prefix, and not for room, when the latest Step was made
        self._roster = roster
        self._costs = costs
        self._pins = pins
        self._lookahead_tokens = lookahead_tokens
        self._moving_out: dict[int, Group] = {}  # those that the Step under way swaps out
        self._asked: Step | None = None
        self._extended: Collection[int] = ()  # sequences that the latest Step asked room for
        self._refused_at: int | None = None
        self._last_step = 0

    @property
    def under_way(self) -> bool:
        """Whether a Step waits for its answer."""
        return self._asked is not None

    def late_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence has no room because an answer is late, and not because the pool is full."""
        return self._asked is not None and (sequence.id in self._extended or self._roster.mirror.available > 0)

    # Answers.

    def apply(self, result: StepResult) -> list[Admitted]:
        """Take an answer in: tables, refusals, copies, and the count of available blocks. Return who was admitted."""
        asked, roster = self._asked, self._roster
        if asked is None or asked.step != result.step:
            raise BlockManagerBroken(f"step {result.step} was answered, {asked and asked.step} was asked")
        self._asked = None
        roster.mirror.available = result.available_blocks
        roster.mirror.available_host = result.available_host_blocks
        if asked.commits or result.available_blocks != self._refused_at:
            self._refused_at = None
        if result.device_to_host or result.host_to_device or result.copies:
            self.copies.append(Copies(result.device_to_host, result.host_to_device, result.copies))
        _check_refusals(result.refusals)
        self._pins.answered({one.position: one.detail for one in result.refusals if one.item is StepItem.PIN})
        refused = {(refusal.item, refusal.position) for refusal in result.refusals}
        self._stay_running(
            group for position, group in enumerate(asked.swap_outs) if (StepItem.SWAP_OUT, position) in refused
        )
        for change in result.tables[2 * len(asked.forks) :]:  # what the forks did is here since they were asked
            self._change_table(roster.sequence(change.sequence), change)
        self._moving_out.clear()
        cached = {change.sequence: change.cached_tokens for change in result.tables}
        begun = [(StepItem.SWAP_IN, position, group, None) for position, group in enumerate(asked.swap_ins)] + [
            (StepItem.ALLOCATE, position, item.group, cached.get(item.sequence))
            for position, item in enumerate(asked.allocates)
        ]
        admitted = []
        for item, position, number, tokens in begun:
            group = roster.admitting.pop(number)
            if (item, position) in refused:
                self._stay_waiting(group)
            else:
                admitted.append(Admitted(group, tokens))
        return admitted

    def _change_table(self, sequence: Sequence, change: TableChange) -> None:
        mirror = self._roster.mirror
        if sequence.group.id in self._moving_out:
            mirror.move_out(sequence, change)
        elif sequence.swapped:
            mirror.move_in(sequence, change)
        else:
            mirror.change_table(sequence, change)

    def undo(self, available_blocks: int, available_host_blocks: int, pins: Collection[str]) -> None:
        """The Step under way is never answered: frees, commits and forks hold, but nothing was granted or moved."""
        for group in self._roster.admitting.values():
            self._stay_waiting(group)
        self._roster.admitting.clear()
        self._stay_running(list(self._moving_out))
        self._pins.undo(pins)
        self._asked = self._refused_at = None
        self._roster.mirror.available = available_blocks
        self._roster.mirror.available_host = available_host_blocks

    def _stay_running(self, numbers: Iterable[int]) -> None:
        """Let groups that were to be swapped out go on: they have their blocks still."""
        roster = self._roster
        for number in numbers:
            group = self._moving_out.pop(number)
            for member in group.members:
                roster.mirror.retake(member)
            if group in roster.waiting:
                roster.stop_waiting(group)
                roster.run(group)

    def _stay_waiting(self, group: Group) -> None:
        roster = self._roster
        roster.claims.withdraw(group)
        self._refused_at = roster.mirror.available
        if group.ended:
            roster.give_back(group.members, FreeReason.CANCELLED)
        else:
            roster.wait(group)

    # Steps.

    def ask(self, plan: StepPlan | None, now: float) -> Step | None:
        """Make the Step that the turn after `plan` needs; None while one is under way or nothing is to be asked."""
        if self._asked is not None:
            return None
        building = StepBuilder()
        self._commit(building)
        self._pins.write(building)
        self._fork(building)
        self._free(building)
        preempted = self._extend(building, plan, now)
        self.deferred = 0
        if not preempted:
            self._allocate(building, now)
        self._tell_lengths(building)
        step = building.build(self._last_step + 1)
        if step is None:
            return None
        self._last_step = step.step
        self._asked = step
        return step

    def _commit(self, step: StepBuilder) -> None:
        roster = self._roster
        size = roster.capacity.block_size
        members = (member for group in roster.running for member in group.members)
        holders = [member for member in members if member.table and not member.leaving]
        leaving = (sequence for sequence, _ in roster.to_free if not sequence.swapped)
        for sequence in [*holders, *leaving]:
            done = sequence.computed // size
            if done > sequence.committed:
                tokens = sequence.tokens[sequence.committed * size : done * size]
                step.commits.append(Commit(sequence.id, sequence.committed, tokens))
                sequence.committed = done
                roster.claims.settle(sequence.group, done)

    def _fork(self, step: StepBuilder) -> None:
        """Let the samples go their own ways where their trunk has all that they have in common."""
        for group in self._roster.running:
            if group.to_fork:
                trunk = group.trunk
                for child in group.live:
                    if child is not trunk:
                        self._fork_off(step, trunk, child)
                group.forked = True
                if trunk.finish is not None:
                    self._roster.give_back([trunk], FreeReason.FINISHED)
            elif group.beams:
                for child in group.live:
                    parent, child.parent = child.parent, None
                    if parent is not None:
                        self._fork_off(step, parent, child)

    def _fork_off(self, step: StepBuilder, parent: Sequence, child: Sequence) -> None:
        """Let a sequence share all that its parent has computed."""
        step.forks.append(Fork(parent.id, child.id, parent.computed))
        self._roster.mirror.fork(parent, child, parent.computed)
        child.computed, child.committed, child.told = parent.computed, parent.committed, parent.told

    def _free(self, step: StepBuilder) -> None:
        roster = self._roster
        for sequence, reason in roster.to_free:
            step.frees.append(Free(sequence.id, reason))
            roster.freed(sequence)
            if sequence.group.ended:
                roster.claims.withdraw(sequence.group)
        roster.to_free.clear()

    def _tell_lengths(self, step: StepBuilder) -> None:
        for group in self._roster.running:
            for sequence in group.members:
                if sequence.table and sequence.computed != sequence.told:
                    sequence.told = sequence.computed
                    step.lengths.append(Length(sequence.id, sequence.computed))

    def _extend(self, step: StepBuilder, plan: StepPlan | None, now: float) -> bool:
        """Ask room for the next step, preempting where it must be; then lookahead, where blocks are left."""
        roster, mirror = self._roster, self._roster.mirror
        ahead = {work.sequence: work for work in plan.work} if plan else {}
        rooms: dict[int, int] = {}
        preempted = False
        for group in list(roster.running):
            needs = _needs(group, ahead)
            if not needs or group not in roster.running:
                continue
            cost = mirror.cost(needs)
            while cost > mirror.available and self._preempt_after(group, step, now):
                preempted = True
            if cost <= mirror.available:
                mirror.available -= cost
                rooms.update((sequence.id, room) for sequence, room in needs)
        sequences = roster.running_sequences
        for group in roster.running:
            for sequence in group.active:
                more = self._lookahead_tokens if mirror.available >= sequences else 0
                self._look_ahead(sequence, ahead.get(sequence.id), rooms, more)
        for group in roster.running:
            if pairs := [(member.id, rooms[member.id]) for member in group.members if member.id in rooms]:
                step.extends.append(Extend(group.id, pairs))
        self._extended = rooms.keys()
        return preempted

    def _look_ahead(self, sequence: Sequence, work: Work | None, rooms: dict[int, int], more: int) -> None:
        """Ask for the rest of a prompt as far as one step's budget, or for `more` tokens of a decoding sequence."""
        need = _need(sequence, work)
        if need is None or need > max(sequence.room, rooms.get(sequence.id, 0)):
            return
        mirror = self._roster.mirror
        rest = sequence.group.end_of(sequence) - need
        if rest > 0:
            more = min(rest, self._roster.limits.token_budget)
        elif sequence.group.beams:
            more = 0  # the next fork would take it away
        wish = min(need + more, sequence.most_slots)
        held = max(len(sequence.table), mirror.blocks_for(rooms.get(sequence.id, 0)))
        extra = min(mirror.blocks_for(wish) - held, mirror.available)
        if extra > 0:
            mirror.available -= extra
            rooms[sequence.id] = min(wish, (held + extra) * mirror.block_size)

    def _preempt_after(self, needy: Group, step: StepBuilder, now: float) -> bool:
        """Preempt the largest running group if it is larger than `needy`; return whether there was one."""
        roster = self._roster
        victim = roster.running[-1]
        if victim is needy:
            return False
        roster.running.pop()
        victim.preempted_at.append(now)
        roster.totals.preemptions += 1
        if self._is_swapped(victim):
            self._swap_out(step, victim)
        else:
            for member in victim.members:
                if member.table:
                    step.frees.append(Free(member.id, FreeReason.PREEMPTED, needy.id))
                    roster.freed(member)
            victim.gather()
        roster.claims.withdraw(victim)
        roster.wait(victim)
        return True

    def _is_swapped(self, victim: Group) -> bool:
        """Return whether a victim is moved to the host, where it surely fits, or computed again."""
        roster, blocks = self._roster, victim.blocks
        if roster.mirror.host_cost(blocks) > roster.mirror.available_host:
            return False
        if roster.limits.preemption is not Preemption.AUTO:
            return roster.limits.preemption is Preemption.SWAP
        tokens = sum(member.computed for member in victim.members)
        return len(victim.live) > 1 or self._costs.swap_is_cheaper(tokens, len(blocks))

    def _swap_out(self, step: StepBuilder, victim: Group) -> None:
        mirror, tokens = self._roster.mirror, sum(member.computed for member in victim.members)
        victim.swapped_tokens += tokens
        self._roster.totals.swapped_tokens += tokens
        step.swap_outs.append(victim.id)
        self._moving_out[victim.id] = victim
        mirror.available_host -= mirror.host_cost(victim.blocks)
        for member in victim.members:
            mirror.release(member)

    def _allocate(self, step: StepBuilder, now: float) -> None:
        """Ask blocks for waiting groups, smallest first, as far as the next step's budget and the pool go."""
        roster, mirror, limits = self._roster, self._roster.mirror, self._roster.limits
        if self._refused_at is not None and mirror.available <= self._refused_at:
            return
        budget = limits.token_budget
        places = limits.max_sequences - roster.running_sequences
        places -= sum(group.width for group in roster.admitting.values())
        spare = self._spare_blocks()
        for group in list(roster.waiting):
            if budget <= 0 or group.width > places:
                break
            # Who runs can grow into it before anybody is preempted; who would be alone needs nobody's leave.
            reserve = roster.watermark if roster.running or roster.admitting else 0
            if group.isolated and roster.holds_isolated:
                continue  # one at a time
            if group.swapped:
                if len(group.blocks) + spare + reserve > mirror.available:
                    break
                self._ask_return(step, group)
                places -= group.width
                spare += group.width
                continue
            if roster.claims.blocks(group):
                self.deferred += 1
                continue
            spare += self._blocks_beyond(group)
            self._ask_admission(step, group, spare + reserve, now)
            places -= group.width
            budget -= group.common
            needed = mirror.blocks_for(group.common)
            if needed + spare + reserve > mirror.available:
                # Only a cached prefix can make it fit. Nobody after it is asked for, or it could be overtaken for ever.
                break
            granted = mirror.blocks_for(min(group.common, limits.token_budget))
            mirror.available -= granted
            spare += group.width + needed - granted

    def _spare_blocks(self) -> int:
        """Blocks that running groups will want soon: the rest of their prompts, and one more for each sequence."""
        return sum(
            len(group.live) + self._roster.mirror.cost([(group.trunk, group.common)]) + self._blocks_beyond(group)
            if group.alone
            else sum(1 + self._roster.mirror.cost([(member, len(member.tokens))]) for member in group.live)
            for group in self._roster.running
        )

    def _blocks_beyond(self, group: Group) -> int:
        """Return the blocks that the samples or beams of a group need for themselves once they are forked."""
        if not group.alone:
            return 0
        blocks_for, whole = self._roster.mirror.blocks_for, group.common // self._roster.capacity.block_size
        lengths = [len(member.tokens) for member in group.live]
        lengths += lengths[:1] * (group.width - len(lengths))
        most = sum(blocks_for(length) - whole for length in lengths)
        return most - (blocks_for(group.common) - whole)

    def _ask_return(self, step: StepBuilder, group: Group) -> None:
        roster = self._roster
        roster.stop_waiting(group)
        roster.admitting[group.id] = group
        roster.mirror.available -= len(group.blocks)
        step.swap_ins.append(group.id)

    def _ask_admission(self, step: StepBuilder, group: Group, spare: int, now: float) -> None:
        roster, request = self._roster, group.request
        roster.stop_waiting(group)
        roster.admitting[group.id] = group
        roster.claims.claim(group)
        step.allocates.append(
            Allocate(
                group=group.id,
                sequence=group.trunk.id,
                request_id=request.request_id,
                salt=group.salt,
                token_ids=group.beginning,
                compute_tokens=roster.limits.token_budget,
                spare_blocks=spare,
                waited_seconds=max(0.0, now - request.arrival),
            )
        )


def _check_refusals(refusals: Iterable[Refusal]) -> None:
    for refusal in refusals:
        if refusal.item not in (StepItem.PIN, StepItem.SWAP_OUT, StepItem.SWAP_IN, StepItem.EXTEND, StepItem.ALLOCATE):
            raise BlockManagerBroken(f"{refusal.item.name.lower()} was refused: {refusal.detail}")


def _needs(group: Group, ahead: dict[int, Work]) -> list[tuple[Sequence, int]]:
    """Return the sequences of a group that have no room for their next step, and the room that each needs."""
    needs = ((sequence, _need(sequence, ahead.get(sequence.id))) for sequence in group.active)
    return [(sequence, need) for sequence, need in needs if need is not None and need > sequence.room]


def _need(sequence: Sequence, work: Work | None) -> int | None:
    """Return the room that the sequence's next step needs at least, None when it has no next step of its own."""
    last = sequence.generated + 1 >= sequence.request.stopping.max_tokens
    if work and work.samples and (last or sequence.group.beams):  # what a beam finds decides whether it goes on
        return None
    need = (work.end if work else sequence.computed) + 1
    return need if need <= sequence.most_slots else None
