"""Extends the room of running sequences."""

from collections.abc import Iterable, Mapping

from blocks import Extend, blocks_for
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import Victims
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.speculation.speculator import exclusion_of
from engine.schedule.step_plan import StepPlan, Work

# Available blocks for each running sequence from which on room is requested half a block earlier.
_ROOMY_BLOCKS = 8

_NO_WORK: Mapping[int, Work] = {}


class Extensions:
    """Requests room for the next step, preempting if necessary; then lookahead, if blocks are left."""

    def __init__(self, queue: RequestQueue, view: PoolView, victims: Victims, lookahead_tokens: int) -> None:
        """Start without pending extensions; decoding requests room `lookahead_tokens` ahead of its next step."""
        self._queue = queue
        self._view = view
        self._victims = victims
        self._lookahead_tokens = lookahead_tokens
        # The step in flight may accept all its proposals, and the next one proposes as many.
        self._proposed_tokens = 2 * queue.limits.proposed_tokens
        self._proposed_blocks = blocks_for(queue.limits.proposed_tokens, view.block_size) + 1
        self._rooms: dict[int, int] = {}  # requested by the latest block step, by sequence
        self._work = _NO_WORK  # of the preceding step, by sequence

    def requested(self, sequence: Sequence) -> bool:
        """Return whether the latest block step requested room for a sequence."""
        return sequence.id in self._rooms

    def may_need(self, group: Group) -> bool:
        """Return whether a live sequence of a group may need room for its next step or the lookahead."""
        ahead = self._lookahead_tokens + self._proposed_tokens
        for sequence in group.members:
            if sequence.room <= len(sequence.tokens) + ahead and sequence.finish is None:
                return True
        return False

    def write(self, step: StepBuilder, plan: StepPlan | None, now: float) -> bool:
        """Add extensions to the block step needed after `plan`; return whether a group was preempted."""
        self._rooms = {}
        if not any(map(self.may_need, self._queue.running)):
            return False
        running = list(self._queue.running)
        self._work = {work.sequence: work for work in plan.work} if plan else _NO_WORK
        preempted = self._extend_all(running, step, now)
        sequences = self._queue.running_sequences
        if preempted:
            running = [group for group in running if group in self._queue.running]
        for group in running:
            for sequence in group.active:
                self._look_ahead(sequence, sequences)
        rooms = self._rooms
        for group in running:
            if pairs := [(member.id, rooms[member.id]) for member in group.members if member.id in rooms]:
                step.extends.append(Extend(group.id, pairs))
        return preempted

    def _extend_all(self, groups: Iterable[Group], step: StepBuilder, now: float) -> bool:
        """Reserve the minimum for the next step."""
        queue, view = self._queue, self._view
        preempted = False
        for group in groups:
            needs = self._needs(group)
            if not needs or group not in queue.running:
                continue
            cost, in_windows = view.cost(needs), [window.cost(needs) for window in view.windows]
            while not view.has(cost, in_windows) and self._victims.preempt_for(group, step, now):
                preempted = True
            if view.reserve(cost, in_windows):
                self._rooms.update((sequence.id, room) for sequence, room in needs)
        return preempted

    def _look_ahead(self, sequence: Sequence, sequences: int) -> None:
        """Request the rest of a prompt up to the prefill room, or the lookahead of a decoding sequence."""
        need, view, rooms = self._need(sequence), self._view, self._rooms
        if need is None or need > max(sequence.room, rooms.get(sequence.id, 0)):
            return
        rest = sequence.group.end_of(sequence) - need
        if rest > 0:
            more = min(rest, self._queue.limits.prefill_room)
        elif sequence.group.beams:
            more = 0  # the next fork would release it
        else:
            more = self._lookahead(sequences) + self._room_of_proposals(sequence, need, sequences)
        wish = min(need + more, sequence.max_slots)
        held = max(len(sequence.table), view.blocks_for(rooms.get(sequence.id, 0)))
        extra = min(view.blocks_for(wish) - held, view.least_available)
        if extra > 0:
            view.reserve(extra, (extra,) * len(view.windows))
            rooms[sequence.id] = min(wish, (held + extra) * view.block_size)

    def _lookahead(self, sequences: int) -> int:
        """Return the tokens of room that a decoding sequence requests ahead; `sequences` hold blocks.

        In a pool with many free blocks more is requested, so that one block step extends many sequences.
        """
        available = self._view.least_available
        if available >= _ROOMY_BLOCKS * sequences:
            return self._lookahead_tokens + self._view.block_size // 2
        return self._lookahead_tokens if available >= sequences else 0

    def _room_of_proposals(self, sequence: Sequence, need: int, sequences: int) -> int:
        """Return the tokens of room for proposals of this step and the next; 0 if few blocks are available.

        With the lookahead, they take at most ceil(proposed tokens / block size) + 1 blocks beyond `need`.
        """
        view, blocks = self._view, self._proposed_blocks
        if not self._proposed_tokens or view.least_available < blocks * sequences:
            return 0
        if exclusion_of(sequence.request) is not None:
            return 0
        most = (view.blocks_for(need) + blocks) * view.block_size - need
        return min(self._proposed_tokens, most - self._lookahead(sequences))

    def _needs(self, group: Group) -> list[tuple[Sequence, int]]:
        """Return the sequences of a group that lack room for their next step, with the room that each needs."""
        needs = ((sequence, self._need(sequence)) for sequence in group.active)
        return [(sequence, need) for sequence, need in needs if need is not None and need > sequence.room]

    def _need(self, sequence: Sequence) -> int | None:
        """Return the minimum room for the sequence's next step, None if it has no separate next step."""
        work = self._work.get(sequence.id)
        last = sequence.generated + 1 >= sequence.request.stopping.max_tokens
        if work and work.samples and (last or sequence.group.beams):  # its results decide whether a beam continues
            return None
        need = (work.least_end if work else sequence.computed) + 1
        return need if need <= sequence.max_slots else None
