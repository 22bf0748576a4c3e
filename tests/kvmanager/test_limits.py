"""Limits of a pool and of a Step."""

import pytest

from blocks import Allocate, Commit, Extend, Fork, Pin, Step, StepItem, StepRefusal
from kvmanager import Pool, PoolSpec, limits, report_of
from tests.kvmanager.tiny_pools import allocate

SIZE = 2


def pool_with():
    pool = Pool(PoolSpec("engine", 1, "model", SIZE, 40, 10))
    pool.apply(Step(1, allocates=[Allocate(1, 1, "a", b"", [7] * 8, 8)]))
    pool.apply(Step(2, commits=[Commit(1, 0, [7] * 8)]))
    return pool


BEYOND = {
    "a sequence above the limit": (
        {"MAX_SEQUENCES": 1},
        {"allocates": [allocate(2, [1])]},
        StepRefusal.OUT_OF_BLOCKS,
    ),
    "a fork above the limit of sequences": (
        {"MAX_SEQUENCES": 1},
        {"forks": [Fork(1, 2, 8)]},
        StepRefusal.OUT_OF_BLOCKS,
    ),
    "a prompt longer than a table": (
        {"MAX_TABLE_BLOCKS": 4},
        {"allocates": [allocate(2, [1] * 9)]},
        StepRefusal.INVALID,
    ),
    "a table that grows too long": ({"MAX_TABLE_BLOCKS": 4}, {"extends": [Extend(1, [(1, 9)])]}, StepRefusal.INVALID),
    "a fork above the limit of shares": ({"MAX_SHARES": 3}, {"forks": [Fork(1, 2, 8)]}, StepRefusal.OUT_OF_BLOCKS),
    "a prefix above the limit of shares": (
        {"MAX_SHARES": 3},
        {"allocates": [allocate(2, [7] * 9)]},
        StepRefusal.OUT_OF_BLOCKS,
    ),
    "a pin above the limit of shares": ({"MAX_SHARES": 3}, {"pins": [Pin("p", 1, 4)]}, StepRefusal.OUT_OF_BLOCKS),
    "as many pins as there may be": ({"MAX_PINS": 0}, {"pins": [Pin("p", 1, 4)]}, StepRefusal.INVALID),
}


@pytest.mark.parametrize("case", BEYOND)
def test_an_item_beyond_a_limit_is_refused_and_changes_nothing(case, monkeypatch):
    bounds, items, reason = BEYOND[case]
    pool = pool_with()
    before = report_of(pool)
    for name, value in bounds.items():
        monkeypatch.setattr(limits, name, value)
    (refusal,) = pool.apply(Step(3, **items)).result.refusals
    assert refusal.reason is reason
    before.last_step = 3
    assert report_of(pool) == before
    monkeypatch.undo()
    assert pool.apply(Step(4, **items)).result.refusals == ()


def test_a_step_at_its_block_limit_grants_no_more_but_the_next_one_does(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STEP_BLOCKS", 3)
    pool = pool_with()
    items = [allocate(number, [number] * 4) for number in (2, 3, 4)]
    (refusal,) = pool.apply(Step(3, allocates=items)).result.refusals
    assert (refusal.item, refusal.position, refusal.reason) == (StepItem.ALLOCATE, 2, StepRefusal.OUT_OF_BLOCKS)
    assert pool.apply(Step(4, allocates=items[2:])).result.refusals == ()
    assert pool.violations() == []
