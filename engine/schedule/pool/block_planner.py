"""Block steps for the block manager: each requests the blocks that the turn after the next needs.

At most one block step is in flight, so the count of available blocks is exact when the next block step is built. A
shortage is detected in advance, and the victim's free is in the same block step as the extension it makes room for.
"""

from collections.abc import Iterable, Set
from collections.abc import Sequence as Items
from math import inf

from blocks import Commit, Fork, FreeReason, Length, Reattached, Refusal, Step, StepItem, StepResult, Trim
from engine.errors import BlockManagerBroken
from engine.schedule.pool.admission import Admissions, Admitted
from engine.schedule.pool.condemnations import Condemnations, WrongBlock
from engine.schedule.pool.extensions import Extensions
from engine.schedule.pool.pins import Pins
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import PreemptionCosts, Victims
from engine.schedule.pool.releases import Releases
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Copies, StepPlan, copies_of

# Lengths, and keys of blocks of generated tokens, wait this long for a block step that has other items.
_REPORT_SECONDS = 1.0

# Items that may be refused; any other refusal contradicts the engine's tables.
_MAY_BE_REFUSED = (StepItem.PIN, StepItem.SWAP_OUT, StepItem.SWAP_IN, StepItem.EXTEND, StepItem.ALLOCATE)


class BlockPlanner:
    """Builds block steps and applies their results."""

    def __init__(
        self,
        queue: RequestQueue,
        view: PoolView,
        releases: Releases,
        pins: Pins,
        costs: PreemptionCosts,
        lookahead_tokens: int,
    ) -> None:
        """Start without a block step in flight; decoding requests room `lookahead_tokens` ahead of its next step.

        With a lookahead of 1, a result may arrive a whole step late without a delay.
        """
        self._queue = queue
        self._view = view
        self._releases = releases
        self._pins = pins
        self._victims = Victims(queue, view, releases, costs)
        self._extensions = Extensions(queue, view, self._victims, lookahead_tokens)
        self._admissions = Admissions(queue, view, releases, self._victims)
        self._condemnations = Condemnations(queue, view, releases)
        self._copies: list[Copies] = []  # of results, to run before the next step
        self._pending: Step | None = None
        self._last_step = 0
        self._reported_at = -inf

    @property
    def in_flight(self) -> bool:
        """Whether a block step is in flight."""
        return self._pending is not None

    @property
    def deferred(self) -> int:
        """Groups that waited for the prefix of another group, not for room, at the latest block step."""
        return self._admissions.deferred

    @property
    def next_admitted(self) -> Group | None:
        """The first waiting group if the next block step is expected to admit it."""
        return None if self.in_flight else self._admissions.next_admitted()

    @property
    def has_copies(self) -> bool:
        """Whether copies must run before the next step."""
        return bool(self._copies)

    def count_skipped(self, sequence: Sequence) -> None:
        """Count a sequence that sits out, if it lacks room because a result is late, not because the pool is full."""
        late = self._pending is not None and (self._extensions.requested(sequence) or self._view.least_available > 0)
        self._queue.totals.count_skipped(late)

    def take_copies(self) -> tuple[Copies, ...]:
        """Return the copies of the results since the last call."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def condemn(self, wrong: Items[WrongBlock], now: float) -> Items[Set[int]]:
        """Condemn blocks with the next block step, and let the groups that hold one wait until they can be recomputed.

        Returns the device blocks of each kind that were not condemned before.
        """
        assert self._pending is None, "blocks are checked when an answer has come"
        return self._condemnations.condemn(wrong, now)

    # Results.

    def apply(self, result: StepResult) -> list[Admitted]:
        """Apply tables, refusals, copies and block counts of a result. Return the admitted groups."""
        asked = self._pending
        if asked is None or asked.step != result.step:
            raise BlockManagerBroken(f"result of step {result.step}, but step {asked and asked.step} is in flight")
        self._pending = None
        windows = [(one.available_blocks, one.available_host_blocks) for one in result.windows]
        self._view.set_available(result.available_blocks, result.available_host_blocks, windows)
        if (copies := copies_of(result)).any:
            self._copies.append(copies)
        _check_refusals(result.refusals)
        self._pins.on_result({one.position: one.detail for one in result.refusals if one.item is StepItem.PIN})
        refused = result.refused
        swapping_out = self._victims.swapping_out
        self._victims.resume(
            group for position, group in enumerate(asked.swap_outs) if (StepItem.SWAP_OUT, position) in refused
        )
        forked = 2 * len(asked.forks)  # forks were applied when the block step was built, as trims were
        for window, own in zip(self._view.windows, result.windows, strict=True):
            for change in own.tables[forked:]:
                sequence = self._queue.sequence(change.sequence)
                window.grant(sequence, change, to_host=sequence.group.id in swapping_out)
        for change in result.tables[forked:]:
            sequence = self._queue.sequence(change.sequence)
            self._view.grant(sequence, change, to_host=sequence.group.id in swapping_out)
        self._victims.finish_swap_outs()
        cached = {change.sequence: change.cached_tokens for change in result.tables}
        return self._admissions.on_result(asked, refused, cached)

    def rollback(self, reattached: Reattached) -> None:
        """Roll back the block step in flight: its frees, commits, trims and forks hold, grants and moves do not."""
        self._admissions.rollback()
        self._victims.rollback()
        self._pins.rollback(reattached.pins)
        self._pending = None
        available = reattached.available_blocks, reattached.available_host_blocks
        self._view.set_available(*available, reattached.windows)
        self._view.claims.forget_cached()

    # Block steps.

    def build_step(self, plan: StepPlan | None, now: float) -> Step | None:
        """Build the block step needed after `plan`; None if one is in flight or nothing is needed.

        Lengths, and commits of generated tokens, wait for a block step with other items, for at most a second.
        """
        if self._pending is not None or self._can_wait(now):
            return None
        building = StepBuilder()
        self._condemnations.write(building)
        self._commit(building)
        if self._view.windows:
            self._trim(building)
        self._pins.write(building)
        self._fork(building)
        self._releases.write(building)
        preempted = self._extensions.write(building, plan, now)
        self._admissions.write(building, now, preempted=preempted)
        if not building.empty or now >= self._reported_at + _REPORT_SECONDS:
            self._send_lengths(building, now)
        self._pending = building.build(self._last_step + 1)
        if self._pending is not None:
            self._last_step = self._pending.step
        return self._pending

    def _can_wait(self, now: float) -> bool:
        """Return whether the next block step would have nothing but lengths and commits of generated tokens."""
        if self._releases.any_pending or self._queue.waiting or self._pins.has_changes:
            return False
        if self._condemnations.any_pending:
            return False
        return now < self._reported_at + _REPORT_SECONDS and not any(map(self._needs_step, self._queue.running))

    def _needs_step(self, group: Group) -> bool:
        if group.beams or not group.forked or self._extensions.may_need(group):
            return True
        size, prompt = self._view.block_size, len(group.request.prompt)
        for member in group.members:  # without a generator: it is asked for each sequence of each step
            whole = (member.committed + 1) * size
            if whole <= prompt and whole <= member.computed:
                return True
        return False

    def _commit(self, step: StepBuilder) -> None:
        """Commit keys of whole blocks that are computed."""
        size = self._view.block_size
        for group in self._queue.running:
            for member in group.members:
                if member.table and not member.release_pending and not group.request.scratch:
                    self._commit_blocks(step, member, member.computed // size)
        for sequence in self._releases.pending:
            if not sequence.swapped and not sequence.request.scratch:
                self._commit_blocks(step, sequence, sequence.computed // size)

    def _commit_blocks(self, step: StepBuilder, sequence: Sequence, done: int) -> None:
        if done > (first := sequence.committed):
            size = self._view.block_size
            step.commits.append(Commit(sequence.id, first, sequence.tokens[first * size : done * size]))
            sequence.commit(done)
            self._view.claims.on_commit(sequence, first, done)

    def _trim(self, step: StepBuilder) -> None:
        """Release the blocks of window kinds that no query sees any more: those in flight begin behind them."""
        for group in self._queue.running:
            for member in group.members:
                if member.table and not member.release_pending and self._view.trim(member):
                    step.trims.append(Trim(member.id, member.computed))

    def _fork(self, step: StepBuilder) -> None:
        """Fork samples when their trunk has computed the common tokens; fork beams at each step."""
        for group in self._queue.running:
            if not (trunk_done := group.ready_to_fork) and not group.beams:
                continue
            for parent, child in group.fork():
                step.forks.append(Fork(parent.id, child.id, parent.computed))
                self._view.fork(parent, child, parent.computed)
                child.inherit(parent)
            if trunk_done and group.trunk.finish is not None:
                self._releases.release([group.trunk], FreeReason.FINISHED)

    def _send_lengths(self, step: StepBuilder, now: float) -> None:
        self._reported_at = now
        for group in self._queue.running:
            for sequence in group.members:
                if sequence.table and sequence.computed != sequence.sent:
                    sequence.mark_length_sent()
                    step.lengths.append(Length(sequence.id, sequence.computed))


def _check_refusals(refusals: Iterable[Refusal]) -> None:
    for refusal in refusals:
        if refusal.item not in _MAY_BE_REFUSED:
            raise BlockManagerBroken(f"{refusal.item.name.lower()} was refused: {refusal.detail}")
