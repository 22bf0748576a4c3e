"""Who waits for a prefix that another request computes, and for how long."""

from collections import deque

import pytest

from blocks import Step
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.pool.preemption import PreemptionCosts
from simulation.runner import DigestRunner
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import EngineInProcess

BLOCK = 4
PREFIX = tuple(range(1, 41))  # ten blocks
LIMITS = Limits(token_budget=128, max_sequences=64)


class SwapsAreCheap(PreemptionCosts):
    def swap_is_cheaper(self, tokens: int, blocks: int) -> bool:
        return tokens > 0 < blocks


class Rig(EngineInProcess):
    """An engine over a model without tensors, with all Steps that it sends."""

    def __init__(
        self, limits: Limits = LIMITS, blocks: int = 400, *, caches_prefixes: bool = True, host_blocks: int = 0
    ) -> None:
        capacity = Capacity(128, 200, BLOCK, blocks, host_blocks, caches_prefixes=caches_prefixes)
        self.watched = WatchedScheduler(capacity, limits, SwapsAreCheap())
        self.steps: list[Step] = []
        runner = DigestRunner(capacity)
        super().__init__(runner, capacity, observe=lambda step, _: self.steps.append(step), scheduler=self.watched)
        self.watched.pool = lambda: self.blocks.pool

    def submit_behind_prefix(self, count: int) -> list[str]:
        """Submit requests that differ in their last token only."""
        return [self.submit((*PREFIX, 100 + number), 4) for number in range(count)]

    @property
    def answers_with_admissions(self) -> int:
        return sum(bool(step.allocates) for step in self.steps)

    def forget_prefixes(self) -> None:
        """Let the pool lose what it caches, as at a restart of its manager, without the engine's notice."""
        for pool in (self.blocks.pool, self.blocks._replica.pool):
            deque(pool.device.resetting_keys())


def test_all_requests_behind_one_cached_prefix_are_admitted_by_two_answers() -> None:
    rig = Rig()
    rig.generate([(*PREFIX, 99)], 1)
    rig.steps.clear()
    names = rig.submit_behind_prefix(60)
    rig.turn_until(lambda: rig.scheduler.running == 60)
    assert rig.answers_with_admissions <= 2
    rig.run()
    assert {rig.cached[name] for name in names} == {len(PREFIX)}


def test_cold_requests_with_one_prefix_compute_it_once_and_are_then_admitted_together() -> None:
    rig = Rig()
    names = rig.submit_behind_prefix(60)
    rig.turn_until(lambda: rig.scheduler.running == 60)
    assert rig.answers_with_admissions == 2, "the first alone, then all others"
    rig.run()
    assert sorted(rig.cached[name] for name in names) == [0] + [len(PREFIX)] * 59


def test_requests_behind_a_held_prefix_fit_into_a_pool_that_could_not_hold_it_for_each() -> None:
    rig = Rig(blocks=60)
    rig.submit((*PREFIX, 99), 40)
    rig.turn_until(lambda: rig.tokens["r0"])
    rig.steps.clear()
    names = rig.submit_behind_prefix(12)
    rig.turn_until(lambda: rig.scheduler.running == 13)
    assert rig.answers_with_admissions == 1
    rig.run()
    assert {rig.cached[name] for name in names} == {len(PREFIX)}


def test_a_prefix_that_is_no_longer_cached_is_computed_again_without_a_wait() -> None:
    rig = Rig()
    rig.generate([(*PREFIX, 99)], 1)
    rig.forget_prefixes()
    rig.steps.clear()
    names = rig.submit_behind_prefix(3)
    rig.turn_until(lambda: rig.scheduler.running == 3)
    assert rig.answers_with_admissions == 1, "nobody waits for a block that is believed to be cached"
    rig.run()
    assert [rig.cached[name] for name in names] == [0, 0, 0]
    later = rig.submit_behind_prefix(2)
    rig.run()
    assert {rig.cached[name] for name in later} == {len(PREFIX)}


def test_after_a_reset_equal_prompts_compute_their_prefix_once() -> None:
    rig = Rig()
    rig.generate([(*PREFIX, 99)], 1)
    rig.scheduler.requests.reset(0.0)
    rig.turn()
    names = rig.submit_behind_prefix(3)
    rig.run()
    assert sorted(rig.cached[name] for name in names) == [0, len(PREFIX), len(PREFIX)]


def test_nobody_waits_where_the_block_manager_caches_nothing() -> None:
    rig = Rig(caches_prefixes=False)
    rig.submit_behind_prefix(3)
    rig.turn_until(lambda: rig.scheduler.running == 3)
    assert rig.answers_with_admissions == 1
    rig.run()


@pytest.mark.parametrize(("priority", "age", "deferred"), [(-1, 0, 0), (0, 0, 1), (0, 9, 1), (1, 0, 1)])
def test_a_request_waits_for_one_before_it_or_of_its_priority(priority: int, age: int, deferred: int) -> None:
    rig = Rig(Limits(token_budget=8, max_sequences=4))
    rig.submit((*PREFIX, 99), 4)
    rig.turn_until(lambda: rig.scheduler.running == 1)
    rig.submit((*PREFIX, 98), 4, priority=priority, age=age)
    rig.turn_times(2)
    assert (rig.scheduler.deferred, rig.scheduler.running) == (deferred, 2 - deferred)
    rig.run()


def test_the_allocation_names_the_request_that_computed_the_prefix() -> None:
    rig = Rig()
    first, second = rig.submit_behind_prefix(2)
    rig.run()
    behind = {one.request_id: one.prefix_of for step in rig.steps for one in step.allocates}
    assert behind == {first: "", second: first}


def serve_behind_a_prefix(preemption: Preemption) -> tuple[Rig, int]:
    """Serve ten requests with one prefix in a pool for about five of them; return the number of turns as well."""
    limits = Limits(token_budget=128, max_sequences=64, preemption=preemption)
    rig = Rig(limits, blocks=20, host_blocks=20)
    names = rig.submit_behind_prefix(1)
    names += [rig.submit((*PREFIX, 101 + number), 24) for number in range(9)]
    turns = 0
    while not rig.scheduler.empty:
        rig.turn()
        turns += 1
    assert {*names} <= {*rig.finished}
    return rig, turns


def test_a_group_that_shares_most_of_its_blocks_is_recomputed_because_a_swap_would_not_share_them_again() -> None:
    recomputing, turns = serve_behind_a_prefix(Preemption.RECOMPUTE)
    rig, turns_of_auto = serve_behind_a_prefix(Preemption.AUTO)
    assert rig.scheduler.totals.preemptions > 0
    assert rig.scheduler.totals.recomputed_tokens > 0
    assert turns_of_auto <= 1.1 * turns
    assert rig.samples == recomputing.samples
