"""Preemption: which groups lose their blocks, and how they resume (section 4.5 of the paper).

A preempted group is recomputed, or swapped out to host memory and back in.
"""

from collections.abc import Iterable

from blocks import Free, FreeReason
from engine.schedule.limits import Preemption
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.releases import Releases
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import StepPlan

# Smaller steps measure decoding, not prefill.
_MIN_TOKENS = 16
_SMOOTHING = 0.2


class PreemptionCosts:
    """Measured costs in seconds: of recomputing a token, and of swapping a block."""

    def __init__(self, seconds_per_block: float = 0.0) -> None:
        """Start with the measured time to copy one block to the other tier. The cost of a token is unknown."""
        self._seconds_per_block = seconds_per_block
        self._seconds_per_token: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the cost of a token from the duration of a step."""
        tokens = sum(len(work.token_ids) - work.proposed for work in plan.work)
        if tokens < _MIN_TOKENS:
            return
        latest = seconds / tokens
        before = latest if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = before + _SMOOTHING * (latest - before)

    def swap_is_cheaper(self, tokens: int, blocks: int) -> bool:
        """Return whether swapping the blocks out and in is faster than recomputing the tokens."""
        if self._seconds_per_token is None:
            return True
        return 2 * blocks * self._seconds_per_block < tokens * self._seconds_per_token


class Victims:
    """Preempts groups. `swapping_out` are the groups that the block step in flight swaps out."""

    def __init__(self, queue: RequestQueue, view: PoolView, releases: Releases, costs: PreemptionCosts) -> None:
        self.swapping_out: dict[int, Group] = {}
        self._queue = queue
        self._view = view
        self._releases = releases
        self._costs = costs

    def preempt_for(self, requester: Group, step: StepBuilder, now: float) -> bool:
        """Preempt the largest running group if it is larger than `requester`; return whether there was one."""
        queue = self._queue
        victim = queue.running[-1]
        if victim is requester:
            return False
        swapped_tokens = 0
        if self._is_swapped(victim):
            swapped_tokens = sum(member.computed for member in victim.members)
            self._swap_out(step, victim)
        else:
            for member in victim.members:
                if member.table:
                    self._releases.free(step, Free(member.id, FreeReason.PREEMPTED, requester.id), member)
            victim.restart_from_trunk()
        self._view.claims.release_all(victim)
        victim.stats.preempt(now, swapped_tokens)
        queue.totals.count_preemption(swapped_tokens)
        queue.preempt(victim)
        return True

    def next_is_swapped(self) -> bool:
        """Return whether the next preempted group would be swapped out, so that no token is recomputed."""
        running = self._queue.running
        return bool(running) and self._is_swapped(running[-1])

    def resume(self, groups: Iterable[int]) -> None:
        """Resume groups whose swap-out was refused: they still have their blocks."""
        for number in groups:
            group = self.swapping_out.pop(number)
            self._view.rollback_swap_out(group.members)
            self._queue.resume(group)

    def rollback(self) -> None:
        """Resume all groups that the block step in flight would swap out."""
        self.resume(list(self.swapping_out))

    def finish_swap_outs(self) -> None:
        """Forget the swap-outs of the answered block step: each is done or refused."""
        self.swapping_out.clear()

    def _is_swapped(self, victim: Group) -> bool:
        """Return whether a victim is swapped out, if it surely fits into the host tier, or recomputed."""
        blocks, preemption = victim.blocks, self._queue.limits.preemption
        if self._view.host_cost(blocks) > self._view.available_host:
            return False
        if any(len(one.live(victim.members)) > one.available_host for one in self._view.windows):
            return False
        if preemption is not Preemption.AUTO:
            return preemption is Preemption.SWAP
        if 2 * self._view.shared_blocks(victim.members) >= len(blocks):
            return False  # others keep most of its prefix cached, and a swap would not share it again
        tokens = sum(member.computed for member in victim.members)
        return len(victim.live) > 1 or self._costs.swap_is_cheaper(tokens, len(blocks))

    def _swap_out(self, step: StepBuilder, victim: Group) -> None:
        step.swap_outs.append(victim.id)
        self.swapping_out[victim.id] = victim
        self._view.begin_swap_out(victim.members)
