"""The audit finds damage, names the block, and reports nothing on a valid pool."""

import random
from dataclasses import replace

import pytest

from blocks import Allocate, Commit, Fork, Free, FreeReason, Pin, Step
from kvmanager import PoolChange
from kvmanager.observe import audit, table_follower
from kvmanager.tier.marks import WITHHELD
from tests.kvmanager.test_report import random_step
from tests.kvmanager.tiny_pools import manager_with


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    """Shorten the slices, so that Steps run between them even in a tiny pool."""
    for module in (audit, table_follower):
        monkeypatch.setattr(module, "_SLICE", 3)


def violations_of(manager, session):
    return [violation for found in manager.audit(session) for violation in found]


@pytest.fixture
def lived_in():
    """A manager and a session whose pool has shared, pinned, cached and swapped blocks.

    Device: sequences 1 and 2 hold blocks 1 to 3, a pin holds block 1 too, block 5 is cached. Host: sequence 3 holds 1.
    """
    manager, session = manager_with()
    for step in (
        Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0, 1, 0, 1], 5), Allocate(3, 3, "c", b"", [0, 0], 2)]),
        Step(2, commits=[Commit(1, 0, [1, 0, 1, 0]), Commit(3, 0, [0, 0])], pins=[Pin("pin", 1, 1)]),
        Step(3, forks=[Fork(1, 2, 5)], swap_outs=[3], allocates=[Allocate(4, 4, "d", b"", [1, 1], 2)]),
        Step(4, commits=[Commit(4, 0, [1, 1])]),
        Step(5, frees=[Free(4, FreeReason.FINISHED)]),
    ):
        assert manager.apply(session, step).result.refusals == ()
    pool = session.pool
    assert pool.sequences[1].table == pool.sequences[2].table == [1, 2, 3]
    assert pool.sequences[3].table == [1]
    assert [pool.device.key(block) is not None for block in (4, 5)] == [True, True]
    assert violations_of(manager, session) == []
    return manager, session


def key_of(pool, block):
    return pool.device.key(block)


def leads(pool, key, block):
    pool.device.keys._shards[key[0]][key] = block


DAMAGES = {
    "a held block is released too often": (2, lambda pool: pool.device.release([2])),
    "a cached block is released": (5, lambda pool: pool.device.release([5])),
    "a holder is missing": (2, lambda pool: pool.device.hold([2])),
    "a cached block is held without a holder": (5, lambda pool: pool.device.hold([5])),
    "a cached block is lost": (5, lambda pool: pool.device.cached.remove(5)),
    "a free block is lost": (6, lambda pool: pool.device.free.remove(6)),
    "a cached block is queued as free": (5, lambda pool: pool.device.free.extend([5])),
    "a held block is queued as free": (3, lambda pool: pool.device.free.extend([3])),
    "a free block is queued twice": (7, lambda pool: pool.device.free.extend([7])),
    "a held block is queued as cached": (2, lambda pool: pool.device.cached.extend([2])),
    "a free block is queued as cached": (7, lambda pool: pool.device.cached.extend([7])),
    "a cached block loses its key": (5, lambda pool: pool.device.keys.by_block.__setitem__(5, None)),
    "a held block loses its key": (2, lambda pool: pool.device.keys.by_block.__setitem__(2, None)),
    "a free block has a key": (7, lambda pool: pool.device.keys.by_block.__setitem__(7, b"key")),
    "a key is missing from the index": (5, lambda pool: pool.device.keys.unindex(5)),
    "a key maps to another block": (2, lambda pool: leads(pool, key_of(pool, 5), 2)),
    "a key that no block has is found": (2, lambda pool: leads(pool, b"no block's", 2)),
    "a held block has another key than its sequence": (
        2,
        lambda pool: (pool.device.keys.by_block.__setitem__(2, b"x"), leads(pool, b"x", 2)),
    ),
    "a withheld block is queued": (5, lambda pool: pool.device.marks.set(5, WITHHELD)),
    "a withheld block is held": (3, lambda pool: pool.device.marks.set(3, WITHHELD)),
    "a free block is unfindable": (7, lambda pool: pool.device.marks.unindex(7)),
    "a table has another block": (6, lambda pool: pool.sequences[1].table.__setitem__(2, 6)),
    "a table is longer": (6, lambda pool: pool.sequences[1].table.append(6)),
    "a sequence is missing": (3, lambda pool: pool.state.sequences.pop(2)),
    "a pin is missing": (1, lambda pool: pool.state.pins.pop("pin")),
    "a host block is released too often": (1, lambda pool: pool.host.release([1])),
    "a host block's holder is missing": (1, lambda pool: pool.host.hold([1])),
    "a free host block is lost": (2, lambda pool: pool.host.free.remove(2)),
    "a sequence is in the wrong tier": (1, lambda pool: setattr(pool.sequences[3], "swapped", False)),
}
IN_HOST = {damage for damage in DAMAGES if "host" in damage}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_block_is_named(lived_in, damage):
    manager, session = lived_in
    block, do = DAMAGES[damage]
    do(session.pool)
    found = violations_of(manager, session)
    named = [one for one in found if one.block == block and one.host == (damage in IN_HOST)]
    assert named, found
    assert all(str(block) in one.message for one in named)
    assert all(one.message.startswith("host: ") for one in named if one.host)
    assert len(found) == len(set(found))


SUMS = {
    "saved": lambda pool: setattr(pool.device, "saved", pool.device.saved + 1),
    "shared": lambda pool: setattr(pool.device, "shared", pool.device.shared + 1),
    "in its group": lambda pool: pool.groups[1].pop(2),
    "sum to": lambda pool: setattr(pool.device.cached, "size", pool.device.cached.size + 1),
}


@pytest.mark.parametrize("message", SUMS)
def test_a_wrong_sum_is_found_without_a_block(lived_in, message):
    manager, session = lived_in
    SUMS[message](session.pool)
    assert [(one.block, message in one.message) for one in violations_of(manager, session)] == [(0, True)]


def test_a_table_changed_without_an_event_is_found_during_an_audit(lived_in):
    manager, session = lived_in
    slices = manager.audit(session)
    for _ in range(6):
        assert next(slices) == []
    session.pool.sequences[1].table[2] = 6
    session.pool.device._ref_counts[6], session.pool.device._ref_counts[3] = 1, 1
    session.pool.device.free.remove(6)
    assert [one for found in slices for one in found]


@pytest.mark.parametrize("seed", range(40))
def test_steps_between_the_slices_of_an_audit_cause_no_false_alarm(seed):
    draw = random.Random(seed)
    manager, session = manager_with(draw.randint(4, 40), draw.choice((0, 3, 12)))
    number = 0

    def steps(most):
        nonlocal number
        for _ in range(draw.randint(0, most)):
            number += 1
            manager.apply(session, random_step(session.pool, draw, number))

    steps(20)
    for _ in range(3):
        for found in manager.audit(session):
            assert found == []
            assert session.pool.violations() == []
            steps(3 if draw.random() < 0.9 else 40)  # 40: more than the backlog of a slice
    assert session.audits == []


@pytest.mark.parametrize("seed", range(25))
def test_an_audit_between_the_slices_of_a_step_causes_no_false_alarm(seed):
    draw = random.Random(seed)
    manager, session = manager_with(draw.randint(4, 40), draw.choice((0, 3, 12)))
    audits, begun = [], 0
    for number in range(1, 40):
        work = manager.applying(session, random_step(session.pool, draw, number), budget=1)
        while session.stepping or number > session.pool.last_step:
            next(work, None)
            for audit_ in audits[:]:
                found = next(audit_, None)
                assert not found
                if found is None:
                    audits.remove(audit_)
            if draw.random() < 0.2:
                begun += 1
                audits.append(manager.audit(session))
    for audit_ in audits:
        assert [found for found in audit_ if found] == []
    assert session.totals.audits == begun > 0


def without(step, kept):
    """Return the Step without the items that change the table of one sequence."""
    return replace(
        step,
        forks=[item for item in step.forks if item.parent != kept],
        frees=[item for item in step.frees if item.sequence != kept],
        extends=[item for item in step.extends if item.group != kept],
        swap_outs=[group for group in step.swap_outs if group != kept],
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_wrong_count_is_found_between_steps_and_no_other_block_is_named(seed):
    draw = random.Random(seed)
    manager, session = manager_with(30)
    manager.apply(session, Step(1, allocates=[Allocate(5, 5, "kept", b"other", [1] * 3, 3)]))
    block = session.pool.sequences[5].table[0]
    session.pool.device._ref_counts[block] += 1
    number, found = 1, []
    for slice_ in manager.audit(session):
        found += slice_
        for _ in range(draw.randint(0, 3)):
            number += 1
            manager.apply(session, without(random_step(session.pool, draw, number), 5))
    assert {one.block for one in found if one.block} == {block}


# Damage of a table or a group, which withholding a block does not repair.
NOT_REPAIRED = {"a sequence is missing", "a pin is missing", "a sequence is in the wrong tier"}


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage not in NOT_REPAIRED])
def test_after_an_audit_the_pool_is_valid_and_the_damaged_block_is_never_granted_again(lived_in, damage):
    manager, session = lived_in
    block, do = DAMAGES[damage]
    do(session.pool)
    found = violations_of(manager, session)
    assert session.pool.violations() == []
    assert violations_of(manager, session) == []
    assert session.totals.audit_violations == len(found)
    assert session.totals.audits == 3, "the fixture ran one"
    tier = session.pool.host if damage in IN_HOST else session.pool.device
    free = [Free(number, FreeReason.FINISHED) for number in list(session.pool.sequences)]
    applied = manager.apply(session, Step(50, frees=free))
    assert block in (applied.result.host_withheld_blocks if damage in IN_HOST else applied.result.withheld_blocks)
    assert session.pool.violations() == []
    assert block in tier.marks.withheld() + tier.marks.withheld_on_release()
    draw = random.Random(damage)
    for number in range(100, 160):
        manager.apply(session, random_step(session.pool, draw, number))
        assert session.pool.violations() == []
        swapped = damage in IN_HOST
        assert not any(block in one.table for one in session.pool.sequences.values() if one.swapped == swapped)


def test_withholding_is_an_event_and_appears_in_the_next_answer_only(lived_in):
    manager, session = lived_in
    session.pool.device.hold([5])
    session.pool.host.hold([1])
    number = manager.ledger.next_number
    violations_of(manager, session)
    device, host = manager.ledger.events(number, 10).events
    assert (device.change, device.ranges, device.engine_id) == (PoolChange.WITHHELD, ((5, 5),), "engine")
    assert (host.change, host.ranges) == (PoolChange.HOST_WITHHELD, ((1, 1),))
    applied = manager.apply(session, Step(50))
    assert (applied.result.withheld_blocks, applied.result.host_withheld_blocks) == ((5,), (1,))
    applied = manager.apply(session, Step(51))
    assert (applied.result.withheld_blocks, applied.result.host_withheld_blocks) == ((), ())


def test_an_audit_changes_nothing(lived_in, state_of):
    manager, session = lived_in
    before = state_of(session.pool)
    assert violations_of(manager, session) == []
    assert state_of(session.pool) == before


def test_an_audit_ends_with_its_session_without_violations(lived_in):
    manager, session = lived_in
    slices = manager.audit(session)
    next(slices)
    manager.detach(session)
    for _ in session.pool.dismantle():
        pass
    assert list(slices) == []
    assert session.audits == []


def test_a_closed_audit_receives_no_more_steps(lived_in):
    manager, session = lived_in
    slices = manager.audit(session)
    next(slices)
    assert len(session.audits) == 1
    slices.close()
    assert session.audits == []


def test_the_backlog_of_an_audit_stays_short(lived_in):
    manager, session = lived_in
    slices = manager.audit(session)
    next(slices)
    for number in range(100, 1100):
        allocates = [Allocate(number, number, "x", b"", [7, 7], 2)]
        manager.apply(session, Step(number, frees=[Free(number - 1, FreeReason.FINISHED)], allocates=allocates))
        assert len(session.audits[0]._kinds[0]._tables._pending) < 32
    assert [one for found in slices for one in found] == []


def test_a_large_pool_is_audited_in_many_slices(monkeypatch):
    monkeypatch.undo()
    manager, session = manager_with(100_000, 50_000)
    assert sum(1 for _ in manager.audit(session)) >= 400


def test_a_long_table_is_copied_in_several_slices(monkeypatch):
    monkeypatch.undo()
    manager, session = manager_with(20_000, 0)
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "long", b"", [1] * 20_000, 20_000)]))
    empty = sum(1 for _ in manager.audit(manager_with(20_000, 0)[1]))
    assert violations_of(manager, session) == []
    assert sum(1 for _ in manager.audit(session)) >= empty + 30
