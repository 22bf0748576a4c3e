import pytest

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    Reset,
    Unpin,
    block_key,
    root_key,
)
from kvmanager import Eviction
from kvmanager.effects import (
    Allocated,
    Allocation,
    Committed,
    Condemned,
    Extended,
    Forked,
    Freed,
    PinsChanged,
    SwappedIn,
    SwappedOut,
    effect_of,
)
from tests.kvmanager.tiny_pools import FIVE, KEYS, ids


def effects(applied):
    return typed(*map(effect_of, applied.effects))


def typed(*some):
    """Effects with their types, because named tuples equal others with the same fields."""
    return [(type(effect), *(list(one) if isinstance(one, tuple) else one for one in effect)) for effect in some]


@pytest.fixture
def small(new_pool):
    """Eight device blocks and four host blocks of two tokens; sequence 1 of group 7 has blocks 1, 2, 3."""
    pool = new_pool(8, 2, host_blocks=4)
    pool.allocate(1, FIVE, group=7)
    return pool


def test_a_condemn_lists_the_blocks_that_were_not_condemned_before(small):
    items = [Condemn(1, [2, 5], CondemnReason.SWAP_IN), Condemn(9, [5, 3], CondemnReason.HOST_HIT, host=False)]
    assert effects(small.accept(condemns=items)) == typed(
        Condemned(1, 7, [2, 5], CondemnReason.SWAP_IN, False, 0), Condemned(9, 0, [3], CondemnReason.HOST_HIT, False, 0)
    )
    host = Condemn(1, [2], CondemnReason.COPY, host=True)
    assert effects(small.accept(condemns=[host])) == typed(Condemned(1, 7, [2], CondemnReason.COPY, True, 0))
    assert effects(small.accept(condemns=items)) == []


def test_a_commit_lists_its_blocks(small):
    assert effects(small.commit(1, FIVE)) == typed(Committed(1, 7, [1, 2]))


def test_a_commit_through_a_second_sequence_lists_its_blocks(small):
    small.fork(1, 2, 5)
    small.commit(2, FIVE)
    assert effects(small.commit(1, FIVE)) == typed(Committed(1, 7, [1, 2]))


def test_a_pin_lists_its_blocks_and_its_item(small):
    small.commit(1, FIVE)
    item = Pin("p", 1, 2)
    assert effects(small.accept(pins=[item])) == typed(PinsChanged(1, 7, [1, 2], item))


def test_an_unpin_lists_the_released_blocks_tail_first(small):
    small.commit(1, FIVE)
    small.pin("p", 1, 2)
    assert effects(small.unpin("p")) == typed(PinsChanged(0, 0, [2, 1], Unpin("p")))


def test_a_reset_is_an_effect(small):
    assert effects(small.reset()) == typed(PinsChanged(0, 0, (), Reset()))


def test_a_fork_lists_the_shared_blocks_and_the_child(small):
    assert effects(small.fork(1, 2, 3)) == typed(Forked(1, 7, [1, 2], 2))


def test_a_free_lists_the_table_and_its_item(small):
    item = Free(1, FreeReason.PREEMPTED, 9)
    assert effects(small.accept(frees=[item])) == typed(Freed(1, 7, [1, 2, 3], *item[1:]))


def test_a_free_of_a_swapped_sequence_lists_its_host_blocks(small):
    small.swap_out(7)
    item = Free(1, FreeReason.CANCELLED)
    assert effects(small.accept(frees=[item])) == typed(Freed(1, 7, [1, 2, 3], *item[1:]))


def test_a_swap_out_lists_the_host_blocks_of_each_member(small):
    small.fork(1, 2, 5)
    small.extend(7, {1: 6, 2: 6})
    assert effects(small.swap_out(7)) == typed(SwappedOut(1, 7, small.table(1)), SwappedOut(2, 7, small.table(2)))


def test_a_swap_in_lists_the_device_blocks_of_each_member_and_evictions_once(small):
    small.fork(1, 2, 1)
    small.swap_out(7)
    small.prefill(3, ids(50, 16))
    small.free(3)
    evicted = [Eviction(block, small.device.key(block)) for block in small.order()[:1]]
    assert effects(small.swap_in(7)) == typed(
        SwappedIn(1, 7, small.table(1), evicted), SwappedIn(2, 7, small.table(2), [])
    )


def test_an_extend_lists_the_granted_blocks(small):
    assert effects(small.extend(7, {1: 9})) == typed(Extended(1, 7, [4, 5], ()))


def test_an_extend_that_needs_no_block_has_no_effect(small):
    assert effects(small.extend(7, {1: 6})) == []
    small.fork(1, 2, 5)
    small.free(2)
    assert effects(small.extend(7, {1: 6})) == []


def test_an_extend_of_a_whole_group_is_one_effect_with_all_its_blocks(small):
    small.fork(1, 2, 5)
    assert effects(small.extend(7, {2: 8, 1: 8})) == typed(Extended(2, 7, [4, 5, 6], ()))


def test_an_extend_lists_its_evictions(small):
    small.cache(2, [1, 2])  # block 4
    small.allocate(3, ids(50, 8))
    assert effects(small.extend(7, {1: 8})) == typed(Extended(1, 7, [4], (Eviction(4, KEYS[0]),)))


@pytest.mark.parametrize(
    ("tokens", "cached", "missed"),
    [
        ([1, 2, 3, 4, 9], 4, None),
        ([1, 2, 9, 9, 9], 2, block_key(KEYS[0], [9, 9])),
        ([9, 9, 9], 0, block_key(root_key("model", b""), [9, 9])),
    ],
)
def test_an_allocate_lists_its_table_its_hits_and_the_first_missed_key(small, tokens, cached, missed):
    small.commit(1, FIVE)
    applied = small.accept(allocates=[Allocate(2, 2, "r", b"", tokens, len(tokens))])
    allocation = Allocation("r", 5 if cached else 3, cached, cached // 2, missed, 0.0, "")
    assert effects(applied) == typed(Allocated(2, 2, small.table(2), [], allocation))


def test_every_allocate_lists_its_own_evictions(small):
    small.cache(2, [1, 2])  # block 4
    small.cache(3, [3, 3])  # block 5
    small.allocate(4, ids(50, 6))
    items = [Allocate(5, 5, "r", b"", [8], 1), Allocate(6, 6, "r", b"", [9], 1)]
    allocated = map(effect_of, small.accept(allocates=items).effects)
    assert [[block for block, _ in effect.evicted] for effect in allocated] == [[4], [5]]


def test_a_refused_item_has_no_effect(small):
    applied = small.apply(
        condemns=[Condemn(1, [], CondemnReason.HIT)],
        commits=[Commit(1, 1, [1, 2])],
        pins=[Pin("p", 1, 1), Unpin("p")],
        forks=[Fork(1, 1, 1)],
        frees=[Free(9, FreeReason.FAILED)],
        swap_outs=[9],
        swap_ins=[7],
        extends=[Extend(7, [(1, 99)])],
        allocates=[Allocate(7, 2, "r", b"", [1], 1)],
    )
    assert len(applied.result.refusals) == 10
    assert applied.effects == []
