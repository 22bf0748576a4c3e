import pytest

from blocks import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    StepItem,
    StepRefusal,
    TableChange,
    block_key,
)
from kvmanager import Seal
from tests.kvmanager.tiny_pools import FIVE, KEYS, allocate, ids


@pytest.fixture
def small(new_pool):
    """Eight device blocks and six host blocks of two tokens."""
    return new_pool(8, 2, host_blocks=6)


@pytest.fixture
def swapped(small):
    """Group 1 is in host blocks 1, 2, 3, of which two have keys; device blocks 1 and 2 are still cached."""
    small.prefill(1, FIVE)
    small.swap_out(1)
    return small


class TestSwapOut:
    def test_a_swapped_group_holds_no_device_block(self, small):
        small.prefill(1, FIVE)
        small.fork(1, 2, 5)
        small.extend(1, {1: 6, 2: 6})
        small.swap_out(1)
        assert small.device.counts.held == 0
        assert small.host.counts == (2, 0, 4, 0)

    def test_the_answer_lists_the_copies_and_whole_tables_of_host_blocks_with_their_room(self, small):
        small.prefill(1, FIVE)
        applied = small.swap_out(1)
        assert applied.result.device_to_host == ((1, 1), (2, 2), (3, 3))
        assert applied.result.tables == (TableChange(1, 0, [1, 2, 3], room_tokens=6),)
        assert (applied.result.host_to_device, applied.result.copies, applied.granted_blocks) == ((), (), 0)

    def test_a_copy_carries_its_key_along(self, small):
        small.prefill(1, FIVE)
        applied = small.swap_out(1)
        assert applied.host_sealed == [Seal(1, KEYS[0]), Seal(2, KEYS[1])]
        assert [small.host.key(block) for block in (1, 2, 3)] == [*KEYS, None]

    def test_the_device_blocks_stay_cached_and_are_hit_by_others(self, swapped):
        assert swapped.order() == [4, 5, 6, 7, 8, 3, 2, 1]
        applied = swapped.accept(allocates=[allocate(2, FIVE)])
        assert applied.result.tables == (TableChange(2, 0, [1, 2, 4], room_tokens=6, cached_tokens=4),)
        assert applied.result.host_to_device == ()

    def test_a_keyed_block_that_the_host_tier_has_is_shared_and_not_copied_again(self, swapped):
        swapped.allocate(2, [1, 2, 3, 4, 9])
        applied = swapped.swap_out(2)
        assert applied.result.tables == (TableChange(2, 0, [1, 2, 4], room_tokens=6),)
        assert applied.result.device_to_host == ((4, 4),)
        assert applied.host_sealed == []
        assert [swapped.host.ref_count(block) for block in (1, 2, 3, 4)] == [2, 2, 1, 1]

    def test_a_cached_host_block_is_shared_and_not_evicted_by_the_same_swap_out(self, new_pool):
        pool = new_pool(8, 2, host_blocks=2)
        pool.prefill(1, [1, 2])
        pool.prefill(2, [7, 7])
        pool.swap_out(1, 2)
        pool.free(1, 2)
        assert pool.host.eviction_order() == [1, 2]
        pool.allocate(3, [1, 2, 9])
        applied = pool.swap_out(3)
        assert applied.result.tables == (TableChange(3, 0, [1, 2], room_tokens=4),)
        assert len(applied.result.device_to_host) == 1

    def test_blocks_without_keys_are_always_copied(self, small):
        small.allocate(1, [1, 2])
        small.allocate(2, [1, 2])
        assert len(small.swap_out(1, 2).result.device_to_host) == 2

    @pytest.mark.parametrize("host_blocks", [0, 2])
    def test_too_few_host_blocks_refuse_with_both_counts_and_change_nothing(self, new_pool, host_blocks):
        pool = new_pool(8, 2, host_blocks=host_blocks)
        pool.prefill(1, FIVE)
        assert pool.refuse(swap_outs=[1]) is StepRefusal.OUT_OF_BLOCKS
        (refusal,) = pool.apply(swap_outs=[1]).result.refusals
        assert refusal.detail == f"3 blocks are needed, {host_blocks} are available in the other tier"

    def test_cached_host_blocks_shared_by_the_group_are_no_room_and_a_refusal_does_not_refresh_them(self, new_pool):
        pool = new_pool(8, 2, host_blocks=3)
        pool.prefill(1, FIVE)
        pool.swap_out(1)
        pool.free(1)
        pool.allocate(2, [*FIVE, 6, 7])
        assert pool.refuse(swap_outs=[2]) is StepRefusal.OUT_OF_BLOCKS

    def test_cached_host_blocks_are_evicted_least_recently_used_first_without_an_event(self, new_pool):
        pool = new_pool(8, 2, host_blocks=2)
        pool.prefill(1, [1, 2])
        pool.prefill(2, [3, 4])
        pool.swap_out(1)
        pool.swap_out(2)
        pool.free(2)
        pool.free(1)
        pool.allocate(3, [9])
        applied = pool.swap_out(3)
        assert pool.table(3) == [2]
        assert pool.host.keys.find(KEYS[0]) == 1
        assert (applied.evicted, pool.host.evictions) == ([], [])

    def test_device_blocks_released_by_a_swap_out_may_be_granted_in_the_same_step(self, small):
        small.allocate(1, ids(0, 12))
        applied = small.accept(swap_outs=[1], allocates=[allocate(2, ids(50, 16))])
        assert sorted(small.table(2)) == ids(1, 8)
        assert len(applied.result.device_to_host) == 6

    def test_a_block_shared_with_another_group_is_copied_and_stays_in_the_device(self, small):
        small.prefill(1, FIVE)
        small.allocate(2, [1, 2, 3, 4, 9])
        small.swap_out(1)
        assert small.table(2) == [1, 2, 4]
        assert small.counts([1, 2, 3, 4]) == [1, 1, 0, 1]

    def test_shared_blocks_join_the_release_order_when_the_last_member_releases_them(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 4)
        small.extend(1, {1: 6, 2: 6})  # blocks 3 and 4
        small.swap_out(1)
        assert small.order() == [5, 6, 7, 8, 3, 4, 2, 1]

    def test_tables_that_share_a_device_block_share_a_host_block(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        small.fork(1, 3, 2)
        applied = small.swap_out(1)
        assert applied.result.device_to_host == ((1, 1), (2, 2))
        assert [small.table(sequence) for sequence in (1, 2, 3)] == [[1], [1, 2], [1]]
        assert [small.host.ref_count(block) for block in (1, 2)] == [3, 1]
        assert (small.host.shared, small.host.saved) == (1, 2)

    def test_two_blocks_of_a_group_with_one_key_are_copied_once(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        small.extend(1, {1: 4, 2: 4})
        small.commit(1, [1, 2, 3, 4])
        small.commit(2, [1, 2, 3, 4])
        assert small.table(1) != small.table(2)
        applied = small.swap_out(1)
        assert len(applied.result.device_to_host) == 2
        assert small.table(1) == small.table(2) == [1, 2]
        assert [small.host.ref_count(block) for block in (1, 2)] == [2, 2]

    def test_ten_groups_that_share_a_prefix_of_a_hundred_blocks_fit_into_150_host_blocks(self, new_pool):
        pool = new_pool(200, 2, host_blocks=150)
        prefix = ids(0, 200)
        for group in range(1, 11):
            pool.prefill(group, [*prefix, *ids(1000 * group, 9)])
        copied = sum(len(pool.swap_out(group).result.device_to_host) for group in range(1, 11))
        assert copied == pool.host.counts.held == 150
        assert pool.device.counts.held == 0

    def test_freeing_a_swapped_sequence_releases_its_host_blocks_tail_first(self, swapped):
        swapped.free(1)
        assert swapped.host.eviction_order() == [4, 5, 6, 3, 2, 1]
        assert swapped.host.counts == (4, 2, 0, 0)

    def test_a_host_block_shared_by_a_group_is_held_until_its_last_member_is_freed(self, small):
        small.allocate(1, [1, 2])
        small.fork(1, 2, 2)
        small.swap_out(1)
        small.free(1)
        assert small.host.ref_count(1) == 1
        small.free(2)
        assert small.host.counts == (6, 0, 0, 0)

    def test_host_blocks_released_in_a_step_are_granted_from_the_next_step_on(self, new_pool):
        pool = new_pool(8, 2, host_blocks=3)
        pool.allocate(1, FIVE)
        pool.swap_out(1)
        pool.allocate(2, [9])
        applied = pool.apply(frees=[Free(1, FreeReason.CANCELLED)], swap_outs=[2])
        assert [(refusal.item, refusal.reason) for refusal in applied.result.refusals] == [
            (StepItem.SWAP_OUT, StepRefusal.OUT_OF_BLOCKS)
        ]
        assert applied.host == (3, 0, 0, 0)
        assert pool.swap_out(2).result.refusals == ()

    def test_computed_tokens_of_a_swapped_group_are_kept_but_count_for_no_device_block(self, small):
        small.allocate(1, FIVE)
        small.accept(lengths=[Length(1, 5)])
        small.swap_out(1)
        assert small.pool.sequences[1].computed_tokens == 5
        assert small.pool.computed_tokens() == 0
        small.swap_in(1)
        assert small.pool.computed_tokens() == 5


class TestSwapIn:
    def test_a_swap_in_copies_only_blocks_that_the_device_no_longer_has(self, swapped):
        applied = swapped.swap_in(1)
        assert applied.result.host_to_device == ((3, 4),)
        assert applied.result.tables == (TableChange(1, 0, [1, 2, 4], room_tokens=6),)
        assert (applied.sealed, applied.granted_blocks) == ([], 1)
        assert swapped.host.counts == (4, 2, 0, 0)

    def test_a_copy_carries_its_key_along(self, new_pool):
        pool = new_pool(3, 2, host_blocks=3)
        pool.prefill(1, FIVE)
        pool.swap_out(1)
        pool.allocate(2, ids(50, 6))
        pool.free(2)
        applied = pool.swap_in(1)
        assert [source for source, _ in applied.result.host_to_device] == [1, 2, 3]
        assert applied.sealed == [Seal(pool.table(1)[0], KEYS[0]), Seal(pool.table(1)[1], KEYS[1])]
        assert pool.device.keys.find(KEYS[1]) == pool.table(1)[1]

    def test_the_chain_of_keys_continues(self, swapped):
        swapped.swap_in(1)
        (seal,) = swapped.accept(commits=[Commit(1, 2, [5, 6])]).sealed
        assert seal.key == block_key(KEYS[1], [5, 6])

    def test_the_host_blocks_stay_cached_until_they_are_evicted(self, swapped):
        swapped.swap_in(1)
        assert swapped.host.eviction_order() == [4, 5, 6, 3, 2, 1]
        assert swapped.swap_out(1).result.device_to_host == ((4, 4),)

    def test_tables_that_shared_a_block_share_it_again(self, small):
        small.allocate(1, [1, 2])
        small.fork(1, 2, 2)
        small.swap_out(1)
        applied = small.swap_in(1)
        assert len(applied.result.host_to_device) == 1
        assert small.table(1) == small.table(2)
        assert (small.device.shared, small.device.saved) == (1, 1)

    def test_a_keyed_block_whose_room_was_cut_is_still_copied_on_write(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 3)
        small.free(2)
        small.swap_out(1)
        small.swap_in(1)
        assert small.room(1) == 3
        assert small.extend(1, {1: 4}).result.copies == ((2, 3),)

    @pytest.mark.parametrize(("tokens", "order"), [(14, [1]), (12, [2, 1])])
    def test_device_blocks_shared_by_the_group_are_no_room(self, swapped, tokens, order):
        swapped.allocate(2, ids(50, tokens))  # leaves only blocks that the group hits
        assert swapped.order() == order
        assert swapped.refuse(swap_ins=[1]) is StepRefusal.OUT_OF_BLOCKS

    def test_a_swap_in_reports_its_evictions(self, new_pool):
        pool = new_pool(3, 2, host_blocks=3)
        pool.prefill(1, FIVE)
        pool.swap_out(1)
        pool.cache(2, ids(50, 6))
        cached = [(block, pool.device.key(block)) for block in pool.order()]
        applied = pool.swap_in(1)
        assert applied.evicted == cached
        assert applied.result.device_to_host == ()

    def test_host_blocks_released_by_a_swap_in_are_granted_from_the_next_step_on(self, new_pool):
        pool = new_pool(8, 2, host_blocks=1)
        pool.allocate(1, [1])
        pool.swap_out(1)
        pool.cache(2, [7, 7])
        pool.allocate(3, ids(50, 12))
        applied = pool.accept(swap_ins=[1], extends=[Extend(3, [(3, 13)])])
        assert (applied.evicted_blocks, applied.result.device_to_host) == (1, ())
        assert applied.host == (1, 0, 0, 0)

    def test_a_swap_out_and_in_of_one_step_copies_blocks_without_key_through_the_host(self, small):
        small.prefill(1, FIVE)
        applied = small.accept(swap_outs=[1], swap_ins=[1])
        assert applied.result.device_to_host == ((1, 1), (2, 2), (3, 3))
        assert applied.result.host_to_device == ((3, 4),)
        assert small.table(1) == [1, 2, 4]


SWAPPED_REFUSED = [
    ("swap_outs", 9, StepRefusal.UNKNOWN),
    ("swap_ins", 9, StepRefusal.UNKNOWN),
    ("swap_outs", 1, StepRefusal.INVALID),  # swapped out already
    ("swap_ins", 2, StepRefusal.INVALID),  # on the device
    ("commits", Commit(1, 2, [5, 6]), StepRefusal.INVALID),
    ("pins", Pin("p", 1, 1), StepRefusal.INVALID),
    ("forks", Fork(1, 3, 2), StepRefusal.INVALID),
    ("extends", Extend(1, [(1, 8)]), StepRefusal.INVALID),
    ("extends", Extend(1, [(1, 1)]), StepRefusal.INVALID),
    ("allocates", Allocate(1, 3, "r", b"", [1], 1), StepRefusal.ALREADY_EXISTS),
    ("allocates", Allocate(3, 1, "r", b"", [1], 1), StepRefusal.ALREADY_EXISTS),
]


@pytest.mark.parametrize(("items", "item", "reason"), SWAPPED_REFUSED)
def test_an_item_that_a_swapped_group_forbids_changes_nothing(swapped, items, item, reason):
    swapped.allocate(2, [7])
    assert swapped.refuse(**{items: [item]}) is reason


def test_refused_swaps_are_named_by_their_lists_and_positions(small):
    applied = small.apply(swap_outs=[7], swap_ins=[8, 9])
    assert [(refusal.item, refusal.position) for refusal in applied.result.refusals] == [
        (StepItem.SWAP_OUT, 0),
        (StepItem.SWAP_IN, 0),
        (StepItem.SWAP_IN, 1),
    ]
