import pytest

from blocks import Free, FreeReason, StepRefusal, TableChange, block_key
from kvmanager import Seal
from tests.kvmanager.tiny_pools import KEYS, allocate, ids


@pytest.fixture
def small(new_pool):
    """Four device blocks and three host blocks of two tokens."""
    return new_pool(4, 2, host_blocks=3)


@pytest.fixture
def demoted(small):
    """The two blocks of a prefix are cached in host blocks 1 (its tail) and 2, not in the device."""
    small.cache(1, [1, 2, 3, 4])
    small.allocate(2, ids(50, 8))
    small.free(2)
    return small


class TestDemotion:
    def test_an_evicted_block_moves_to_a_free_host_block_with_its_key(self, small):
        small.cache(1, [1, 2])
        applied = small.accept(allocates=[allocate(2, ids(50, 8))])
        assert applied.result.device_to_host == ((1, 1),)
        assert applied.host_sealed == [Seal(1, KEYS[0])]
        assert applied.evicted == [(1, KEYS[0])]
        assert small.host.keys.find(KEYS[0]) == 1
        assert applied.host == (2, 1, 0, 0)

    def test_blocks_move_in_the_order_of_eviction_so_that_a_tail_goes_first_there_too(self, small):
        small.cache(1, [1, 2, 3, 4])
        applied = small.accept(allocates=[allocate(2, ids(50, 8))])
        assert applied.result.device_to_host == ((2, 1), (1, 2))
        assert small.host.eviction_order() == [3, 1, 2]

    def test_a_block_that_lost_no_key_does_not_move(self, small):
        small.allocate(1, ids(0, 8))
        small.free(1)
        applied = small.accept(allocates=[allocate(2, ids(50, 8))])
        assert (applied.result.device_to_host, applied.host_sealed) == ((), [])

    def test_a_block_does_not_move_when_the_host_tier_has_its_key(self, small):
        small.prefill(1, [1, 2])
        small.swap_out(1)
        applied = small.accept(allocates=[allocate(2, ids(50, 8))])
        assert applied.evicted == [(1, KEYS[0])]
        assert applied.result.device_to_host == ()
        assert applied.host == (2, 0, 1, 0)

    def test_a_block_does_not_move_when_no_host_block_is_free_even_if_some_are_cached(self, new_pool):
        pool = new_pool(2, 2, host_blocks=1)
        pool.cache(1, [1, 2])
        pool.cache(2, ids(50, 4))
        assert pool.host.counts == (0, 1, 0, 0)
        applied = pool.accept(allocates=[allocate(3, ids(60, 4))])
        assert (applied.evicted_blocks, applied.result.device_to_host) == (2, ())
        assert pool.host.keys.find(KEYS[0]) == 1

    def test_without_host_blocks_nothing_moves(self, new_pool):
        pool = new_pool(2, 2)
        pool.cache(1, [1, 2])
        applied = pool.accept(allocates=[allocate(2, ids(50, 4))])
        assert (applied.evicted_blocks, applied.result.device_to_host) == (1, ())

    def test_a_block_does_not_move_to_a_host_block_released_in_the_same_step(self, new_pool):
        pool = new_pool(2, 2, host_blocks=1)
        pool.allocate(1, [9])
        pool.swap_out(1)
        pool.cache(2, [1, 2])
        applied = pool.accept(frees=[Free(1, FreeReason.CANCELLED)], allocates=[allocate(3, ids(50, 4))])
        assert (applied.evicted_blocks, applied.result.device_to_host) == (1, ())
        assert applied.host == (1, 0, 0, 0)

    def test_of_two_evicted_blocks_with_one_key_one_moves(self, small):
        small.allocate(1, [1, 2])
        small.allocate(2, [1, 2])
        small.commit(1, [1, 2])
        small.commit(2, [1, 2])
        small.free(1, 2)
        applied = small.accept(allocates=[allocate(3, ids(50, 8))])
        assert (applied.evicted_blocks, len(applied.result.device_to_host)) == (2, 1)

    def test_a_refused_allocate_moves_nothing(self, small):
        small.cache(1, [1, 2])
        assert small.refuse(allocates=[allocate(2, ids(50, 9))]) is StepRefusal.OUT_OF_BLOCKS

    def test_an_extend_moves_what_it_evicts(self, small):
        small.cache(1, [1, 2])
        small.allocate(2, ids(50, 6))
        applied = small.extend(2, {2: 8})
        assert applied.result.device_to_host == ((1, 1),)

    def test_a_copy_on_write_moves_what_it_evicts(self, small):
        small.cache(1, [1, 2])
        small.allocate(2, ids(50, 5))
        small.fork(2, 3, 5)
        applied = small.extend(2, {2: 6})
        assert (applied.result.device_to_host, applied.result.copies) == (((1, 1),), ((4, 1),))

    def test_a_swap_in_moves_what_it_evicts(self, new_pool):
        pool = new_pool(2, 2, host_blocks=2)
        pool.allocate(1, [9])
        pool.swap_out(1)
        pool.cache(2, [1, 2])
        pool.allocate(3, [8])
        applied = pool.swap_in(1)
        assert (applied.result.device_to_host, applied.result.host_to_device) == (((2, 2),), ((1, 2),))

    def test_a_swap_out_evicts_demoted_blocks(self, demoted):
        demoted.allocate(3, ids(60, 4))
        demoted.swap_out(3)
        assert demoted.table(3) == [3, 1]
        assert [demoted.host.keys.find(key) for key in KEYS] == [2, None]


class TestHostHits:
    def test_a_moved_block_is_a_hit_with_one_copy_back(self, demoted):
        applied = demoted.accept(allocates=[allocate(3, [1, 2, 9])])
        assert applied.hit_tokens == 2
        assert applied.result.tables == (TableChange(3, 0, [1, 2], room_tokens=4, cached_tokens=2),)
        assert applied.result.host_to_device == ((2, 1),)
        assert applied.sealed == [Seal(1, KEYS[0])]
        assert (applied.result.device_to_host, applied.result.copies) == ((), ())

    def test_a_hit_may_span_both_tiers(self, small):
        small.cache(1, [1, 2, 3, 4])
        small.cache(2, ids(50, 5))  # takes the two that were free and the tail
        assert small.keyed([1, 2]) == [True, False]
        applied = small.accept(allocates=[allocate(3, [1, 2, 3, 4, 9])])
        assert applied.hit_tokens == 4
        first, second, _ = small.table(3)
        assert first == 1
        assert applied.result.host_to_device == ((1, second),)

    def test_the_host_block_stays_cached_and_is_granted_last(self, demoted):
        assert demoted.host.eviction_order() == [3, 1, 2]
        demoted.allocate(3, [1, 2, 3, 4, 9])
        assert demoted.host.counts == (1, 2, 0, 0)
        assert demoted.host.eviction_order() == [3, 2, 1]

    def test_a_host_block_that_a_swapped_group_holds_is_a_hit_too(self, small):
        small.prefill(1, [1, 2])
        small.swap_out(1)
        small.cache(2, ids(50, 8))
        applied = small.accept(allocates=[allocate(3, [1, 2, 9])])
        assert (applied.hit_tokens, len(applied.result.host_to_device)) == (2, 1)
        assert small.host.ref_count(1) == 1

    def test_a_hit_in_the_device_is_not_copied_from_the_host(self, small):
        small.prefill(1, [1, 2])
        small.swap_out(1)
        applied = small.accept(allocates=[allocate(2, [1, 2, 9])])
        assert (applied.hit_tokens, applied.result.host_to_device) == (2, ())
        assert small.table(2)[0] == 1

    def test_a_host_hit_needs_a_device_block_like_what_is_computed(self, demoted):
        demoted.allocate(3, ids(60, 4))
        assert demoted.refuse(allocates=[allocate(4, [1, 2, 3, 4, 9])]) is StepRefusal.OUT_OF_BLOCKS
        assert demoted.allocate(4, [1, 2, 9]).cached_tokens == 2

    def test_one_token_of_a_fully_moved_prompt_is_left_to_compute(self, demoted):
        assert demoted.allocate(3, [1, 2, 3, 4]).cached_tokens == 2

    def test_blocks_copied_back_are_committed_and_continue_the_chain(self, demoted):
        demoted.allocate(3, [1, 2, 3, 4, 5, 6])
        sequence = demoted.pool.sequences[3]
        assert (sequence.committed_blocks, sequence.computed_tokens) == (2, 4)
        (seal,) = demoted.commit(3, [1, 2, 3, 4, 5, 6]).sealed
        assert seal.key == block_key(KEYS[1], [5, 6])

    def test_a_block_copied_back_does_not_move_again_while_the_host_has_it(self, demoted):
        demoted.cache(3, [1, 2, 9])
        applied = demoted.accept(allocates=[allocate(4, ids(70, 8))])
        assert [key for _, key in applied.evicted] == [KEYS[0]]
        assert applied.result.device_to_host == ()

    def test_a_block_demoted_and_hit_in_one_step_is_copied_both_ways(self, small):
        small.cache(1, [1, 2])
        small.cache(2, [5, 6, 7, 8])
        applied = small.accept(allocates=[allocate(3, [9, 9, 9]), allocate(4, [1, 2, 3])])
        assert applied.result.device_to_host == ((1, 1), (3, 2), (2, 3))
        assert applied.result.host_to_device == ((1, 3),)
        assert small.table(4) == [3, 2]

    def test_a_hit_is_not_evicted_by_its_own_allocate(self, small):
        small.cache(1, [1, 2, 3, 4])
        small.cache(2, [1, 2, 9, 9, 9])
        applied = small.accept(allocates=[allocate(3, [1, 2, 3, 4, 5, 6, 7])])
        assert applied.result.refusals == ()
        assert len(set(small.table(3))) == 4
        assert applied.hit_tokens == 4


def test_no_host_block_is_held_after_all_sequences_were_freed(demoted):
    demoted.allocate(3, [1, 2, 3, 4, 9])
    demoted.swap_out(3)
    demoted.prefill(4, [1, 2, 7])
    demoted.free(3, 4)
    assert demoted.device.counts.held == demoted.host.counts.held == 0
