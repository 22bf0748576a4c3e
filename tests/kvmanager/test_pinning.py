import pytest

from blocks import Commit, Free, FreeReason, Pin, Reset, StepRefusal, Unpin
from tests.kvmanager.tiny_pools import FIVE, allocate, ids


@pytest.fixture
def small(new_pool):
    """Eight device blocks and four host blocks of two tokens."""
    return new_pool(8, 2, host_blocks=4)


@pytest.fixture
def pinned(small):
    """Blocks 1 and 2 are held by a pin only."""
    small.prefill(1, FIVE)
    small.pin("p", 1, 2)
    small.free(1)
    return small


class TestPins:
    def test_a_pin_adds_a_holder_to_leading_blocks_until_its_unpin(self, small):
        small.prefill(1, [1, 2, 3, 4, 5, 6])
        small.pin("p", 1, 2)
        assert small.counts([1, 2, 3]) == [2, 2, 1]
        assert small.device.counts.held == 3
        small.unpin("p")
        assert small.counts([1, 2, 3]) == [1, 1, 1]

    def test_a_pin_survives_its_sequence(self, pinned):
        assert pinned.counts([1, 2, 3]) == [1, 1, 0]
        assert pinned.device.counts == (6, 0, 2, 0)
        assert pinned.allocate(2, [1, 2, 3, 4, 9]).cached_tokens == 4

    def test_a_pin_survives_its_sequence_within_one_step(self, small):
        small.allocate(1, [1, 2])
        small.accept(commits=[Commit(1, 0, [1, 2])], pins=[Pin("p", 1, 1)], frees=[Free(1, FreeReason.FINISHED)])
        assert small.counts([1]) == [1]

    def test_a_pin_survives_a_swap_out_of_its_sequence(self, small):
        small.prefill(1, FIVE)
        small.pin("p", 1, 2)
        small.swap_out(1)
        assert small.device.counts.held == 2
        assert small.swap_in(1).result.host_to_device == ((3, 4),)
        assert small.counts([1, 2]) == [2, 2]

    def test_pinned_blocks_are_not_evicted(self, pinned):
        pinned.allocate(2, ids(50, 12))
        assert pinned.refuse(allocates=[allocate(3, [9])]) is StepRefusal.OUT_OF_BLOCKS
        pinned.free(2)
        assert pinned.allocate(4, FIVE).cached_tokens == 4

    def test_an_unpinned_prefix_is_released_tail_first_and_stays_cached(self, pinned):
        pinned.unpin("p")
        assert pinned.order() == [4, 5, 6, 7, 8, 3, 2, 1]
        assert pinned.device.counts == (6, 2, 0, 0)

    def test_a_block_with_two_pins_is_held_until_both_are_removed(self, small):
        small.prefill(1, FIVE)
        small.accept(pins=[Pin("p", 1, 2), Pin("q", 1, 1)])
        small.free(1)
        assert small.counts([1, 2]) == [2, 1]
        small.unpin("p")
        assert small.counts([1, 2]) == [1, 0]
        small.unpin("q")
        assert small.device.counts.held == 0

    def test_a_pin_id_may_be_reused_after_its_unpin_even_in_one_step(self, small):
        small.prefill(1, FIVE)
        small.pin("p", 1, 2)
        small.accept(pins=[Unpin("p"), Pin("p", 1, 1)])
        assert small.counts([1, 2]) == [2, 1]

    def test_pinned_blocks_count_as_full(self, pinned):
        assert pinned.pool.computed_tokens() == 4
        pinned.allocate(2, FIVE)
        assert pinned.pool.computed_tokens() == 4
        pinned.accept(lengths=[(2, 1)])
        assert pinned.pool.computed_tokens() == 4

    def test_a_write_to_a_pinned_block_copies_it(self, small):
        small.prefill(1, [1, 2])
        small.pin("p", 1, 1)
        small.fork(1, 2, 1)
        small.free(1)
        assert small.extend(1, {2: 2}).result.copies == ((1, 2),)
        assert small.counts([1]) == [1]


class TestPinTooLarge:
    @pytest.fixture
    def waiting(self, new_pool):
        """Group 1, swapped out, needs three of four device blocks; sequence 2 has two keyed ones."""
        pool = new_pool(4, 2, host_blocks=3)
        pool.allocate(1, FIVE)
        pool.swap_out(1)
        pool.prefill(2, [6, 7, 8, 9])
        return pool

    def test_a_pin_that_leaves_too_little_room_for_a_live_group_is_refused_with_both_counts(self, waiting):
        assert waiting.refuse(pins=[Pin("p", 2, 2)]) is StepRefusal.PIN_TOO_LARGE
        (refusal,) = waiting.apply(pins=[Pin("p", 2, 2)]).result.refusals
        assert refusal.detail == "group 1 has 3 unpinned blocks, but only 2 would remain"

    def test_a_pin_that_leaves_room_for_every_live_group_is_accepted(self, waiting):
        waiting.pin("p", 2, 1)
        waiting.free(2)
        assert waiting.swap_in(1).result.refusals == ()

    def test_earlier_pins_count_too(self, waiting):
        waiting.prefill(3, [50, 51])
        waiting.pin("p", 2, 1)
        assert waiting.refuse(pins=[Pin("q", 3, 1)]) is StepRefusal.PIN_TOO_LARGE

    def test_blocks_pinned_twice_count_once(self, waiting):
        waiting.pin("p", 2, 1)
        waiting.pin("q", 2, 1)
        assert waiting.counts(waiting.table(2)) == [3, 1]

    def test_a_group_may_pin_all_of_its_own_blocks(self, new_pool):
        pool = new_pool(2, 2)
        pool.prefill(1, [1, 2, 3, 4])
        pool.pin("p", 1, 2)
        assert pool.device.counts == (0, 0, 2, 0)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (Pin("q", 9, 1), StepRefusal.UNKNOWN),
        (Pin("", 2, 1), StepRefusal.INVALID),
        (Pin("p", 2, 1), StepRefusal.ALREADY_EXISTS),
        (Pin("q", 2, 0), StepRefusal.INVALID),
        (Pin("q", 2, -1), StepRefusal.INVALID),
        (Pin("q", 2, 3), StepRefusal.INVALID),  # the third block has no key
        (Pin("q", 2, 4), StepRefusal.INVALID),
        (Unpin("q"), StepRefusal.UNKNOWN),
        (Unpin(""), StepRefusal.UNKNOWN),
    ],
)
def test_a_refused_pin_or_unpin_changes_nothing(pinned, item, reason):
    pinned.allocate(2, FIVE)
    assert pinned.refuse(pins=[item]) is reason


class TestReset:
    def test_cached_blocks_become_free_behind_those_that_were_free_in_both_tiers(self, small):
        small.prefill(1, FIVE)
        small.swap_out(1)
        small.free(1)
        assert (small.device.counts, small.host.counts) == ((6, 2, 0, 0), (2, 2, 0, 0))
        order = small.order(), small.host.eviction_order()
        small.reset()
        assert (small.device.counts, small.host.counts) == ((8, 0, 0, 0), (4, 0, 0, 0))
        assert (small.order(), small.host.eviction_order()) == order
        assert small.keyed(ids(1, 8)) == [False] * 8

    def test_blocks_held_by_a_sequence_are_no_longer_hit(self, small):
        small.prefill(1, FIVE)
        small.reset()
        assert small.allocate(2, FIVE).cached_tokens == 0
        assert small.table(1) == [1, 2, 3]

    def test_blocks_held_by_a_pin_are_no_longer_hit_but_stay_pinned(self, pinned):
        pinned.reset()
        assert pinned.counts([1, 2]) == [1, 1]
        assert pinned.allocate(2, FIVE).cached_tokens == 0
        pinned.free(2)
        pinned.unpin("p")
        assert pinned.device.counts == (8, 0, 0, 0)

    def test_a_held_block_is_still_copied_on_write(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 3)
        small.free(2)
        small.reset()
        assert small.extend(1, {1: 4}).result.copies == ((2, 3),)

    def test_a_held_block_is_free_once_its_last_holder_releases_it(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 4)
        small.reset()
        small.free(1)
        assert small.keyed([1, 2]) == [True, True]
        small.free(2)
        assert small.device.counts == (8, 0, 0, 0)
        assert small.order() == [3, 4, 5, 6, 7, 8, 2, 1]

    def test_a_sequence_allocated_before_a_reset_and_committed_after_it_is_never_hit(self, small):
        small.allocate(1, FIVE)
        small.commit(1, [1, 2])
        small.reset()
        small.commit(1, FIVE)
        assert small.allocate(2, FIVE).cached_tokens == 0
        small.free(1, 2)
        assert small.allocate(3, FIVE).cached_tokens == 0

    def test_a_fork_after_a_reset_of_a_sequence_from_before_it_is_never_hit(self, small):
        small.allocate(1, [1, 2])
        small.reset()
        small.fork(1, 2, 2)
        small.commit(2, [1, 2])
        assert small.allocate(3, [1, 2, 3]).cached_tokens == 0

    def test_after_a_reset_only_prompts_cached_after_it_are_hit(self, small):
        small.cache(1, FIVE)
        small.reset()
        assert small.cache(2, FIVE).cached_tokens == 0
        assert small.allocate(3, FIVE).cached_tokens == 4

    def test_every_reset_changes_all_keys(self, small):
        keys = set()
        for sequence in (1, 2, 3):
            small.allocate(sequence, [1, 2])
            keys.update(seal.key for seal in small.commit(sequence, [1, 2]).sealed)
            small.free(sequence)
            small.reset()
        assert len(keys) == 3

    def test_an_allocate_of_the_same_step_has_no_hits(self, small):
        small.cache(1, FIVE)
        assert small.accept(pins=[Reset()], allocates=[allocate(2, FIVE)]).hit_tokens == 0

    def test_a_block_committed_before_it_can_be_committed_through_a_fork_after_it(self, small):
        small.allocate(1, [1, 2])
        small.fork(1, 2, 2)
        small.commit(1, [1, 2])
        small.reset()
        assert small.commit(2, [1, 2]).sealed == []

    def test_a_group_swapped_in_after_a_reset_is_not_hit(self, small):
        small.prefill(1, FIVE)
        small.swap_out(1)
        small.reset()
        assert small.allocate(2, FIVE).cached_tokens == 0
        applied = small.swap_in(1)
        assert [source for source, _ in applied.result.host_to_device] == [1, 2, 3]
        assert small.keyed(small.table(1)) == [True, True, False]
        small.free(2)
        assert small.allocate(3, FIVE).cached_tokens == 0
        assert small.host.counts == (4, 0, 0, 0)

    def test_a_block_from_before_a_reset_keeps_its_key_through_swaps(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 3)
        small.free(2)
        small.reset()
        small.swap_out(1)
        small.swap_in(1)
        assert small.keyed(small.table(1)) == [True, True]
        assert len(small.extend(1, {1: 4}).result.copies) == 1
