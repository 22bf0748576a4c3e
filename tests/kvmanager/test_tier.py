import pytest

from kvmanager import OutOfBlocks, Tier


@pytest.fixture
def five():
    """A tier of five granted blocks."""
    tier = Tier(5)
    for _ in range(5):
        tier.grant()
    return tier


@pytest.fixture
def five_cached(five):
    """A tier whose five blocks are cached with different keys, released in order of their ids."""
    for block in range(1, 6):
        five.keys.seal(block, bytes([block]))
    for block in range(1, 6):
        five.release([block])
    return five


def test_a_block_that_the_index_must_not_find_is_not_withheld(five):
    five.marks.unindex(3)
    assert not five.marks.is_withheld_or_marked(3)
    five.withhold({3: 1})
    assert five.marks.is_withheld_or_marked(3)


def grant_all(tier):
    return [tier.grant() for _ in range(tier.available)]


def test_a_new_tier_grants_1_to_n_and_never_0():
    assert grant_all(Tier(5)) == [1, 2, 3, 4, 5]


def test_a_released_block_is_granted_after_all_blocks_freed_before():
    tier = Tier(3)
    first = tier.grant()
    tier.release([first])
    assert grant_all(tier) == [2, 3, 1]


def test_blocks_without_key_are_granted_before_cached_ones_each_in_order_of_release(five):
    five.keys.seal(2, b"two")
    five.keys.seal(4, b"four")
    for block in (4, 3, 2, 5, 1):
        five.release([block])
    assert five.eviction_order() == [3, 5, 1, 4, 2]
    assert grant_all(five) == [3, 5, 1, 4, 2]


def test_a_hit_is_removed_from_the_middle_of_the_order_and_nothing_else_moves(five_cached):
    five_cached.hold([3])
    assert five_cached.eviction_order() == [1, 2, 4, 5]
    assert five_cached.ref_count(3) == 1
    assert five_cached.counts == (0, 4, 1, 0)


def test_a_hit_moves_a_block_to_the_end_of_the_order(five_cached):
    five_cached.hold([2])
    five_cached.release([2])
    assert five_cached.eviction_order() == [1, 3, 4, 5, 2]


def test_a_block_with_several_holders_joins_the_order_with_its_last_release(five_cached):
    five_cached.hold([1])
    five_cached.hold([1])
    five_cached.hold([1])
    assert (five_cached.shared, five_cached.saved) == (1, 2)
    five_cached.release([1])
    five_cached.release([1])
    assert (five_cached.shared, five_cached.saved) == (0, 0)
    assert 1 not in five_cached.eviction_order()
    five_cached.release([1])
    assert five_cached.eviction_order() == [2, 3, 4, 5, 1]


def test_a_cached_block_keeps_its_key_until_it_is_granted(five_cached):
    assert five_cached.keys.find(b"\x01") == 1
    assert five_cached.grant() == 1
    assert five_cached.keys.find(b"\x01") is None
    assert five_cached.key(1) is None
    assert [five_cached.key(block) for block in (2, 3, 4, 5)] == [b"\x02", b"\x03", b"\x04", b"\x05"]
    assert five_cached.take_evictions() == [(1, b"\x01")]
    assert five_cached.take_evictions() == []


def test_granting_a_block_without_key_evicts_nothing(five):
    five.release([3])
    five.grant()
    assert five.take_evictions() == []


def test_a_lookup_reserves_and_refreshes_nothing(five_cached, state_of):
    before = state_of(five_cached)
    assert five_cached.keys.find(b"\x01") == 1
    assert five_cached.keys.find(b"unknown") is None
    assert state_of(five_cached) == before


def test_of_blocks_with_one_key_the_first_sealed_is_hit(five):
    five.keys.seal(4, b"twin")
    five.keys.seal(2, b"twin")
    five.keys.seal(5, b"twin")
    assert five.keys.find(b"twin") == 4


@pytest.mark.parametrize("evict_first", [4, 2])
def test_of_two_blocks_with_one_key_the_other_is_hit_until_both_are_evicted(five, evict_first):
    five.keys.seal(4, b"twin")
    five.keys.seal(2, b"twin")
    five.release([evict_first])
    assert five.grant() == evict_first
    other = {4: 2, 2: 4}[evict_first]
    assert five.keys.find(b"twin") == other
    five.release([other])
    assert five.grant() == other
    assert five.keys.find(b"twin") is None


def test_granting_from_an_empty_tier_is_refused_and_changes_nothing(five, state_of):
    five.keys.seal(1, b"one")
    before = state_of(five)
    for _ in range(2):
        with pytest.raises(OutOfBlocks):
            five.grant()
    assert state_of(five) == before
    assert five.available == 0


def test_holding_a_free_block_is_an_error_and_changes_nothing(state_of):
    tier = Tier(2)
    before = state_of(tier)
    with pytest.raises(KeyError):
        tier.hold([1])
    assert state_of(tier) == before


def test_every_block_is_in_exactly_one_state(five_cached):
    five_cached.grant()
    five_cached.release([1])
    five_cached.hold([3])
    assert five_cached.counts == (1, 3, 1, 0)
    assert five_cached.available == 4
    assert five_cached.violations({3: 1}) == []


DAMAGES = {
    "released too often": lambda tier: tier.release([2]),
    "held without a holder": lambda tier: tier.hold([2]),
    "lost": lambda tier: tier.cached.remove(2),
    "queued twice": lambda tier: tier.free.extend([2]),
    "without its key": lambda tier: tier.keys.by_block.__setitem__(2, None),
    "unindexed": lambda tier: tier.keys.unindex(2),
    "wrong savings": lambda tier: setattr(tier, "saved", tier.saved + 1),
    "wrong shared count": lambda tier: setattr(tier, "shared", tier.shared + 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_conservation_check_finds_damage(five_cached, damage):
    assert five_cached.violations({}) == []
    damage(five_cached)
    assert five_cached.violations({}) != []


class TestWithholding:
    def test_a_block_without_holder_is_withheld_at_once(self, five_cached):
        five_cached.hold([1])
        five_cached.release([1])
        five_cached.withhold({2: 0, 4: 0})
        assert five_cached.marks.withheld() == [2, 4]
        assert five_cached.keys.find(bytes([2])) is None
        assert grant_all(five_cached) == [3, 5, 1]
        assert five_cached.counts == (0, 0, 3, 2)

    def test_a_held_block_is_unindexed_at_once_and_withheld_when_its_last_holder_releases_it(self, five):
        five.keys.seal(3, b"key")
        five.hold([3])
        five.withhold({3: 2, 4: 1})
        assert (five.marks.withheld_on_release(), five.marks.withheld()) == ([3, 4], [])
        assert five.keys.find(b"key") is None
        assert five.key(3) == b"key", "who holds it must not write to it"
        five.release([3])
        assert five.counts == (0, 0, 5, 0)
        five.release([3, 4, 5])
        assert (five.marks.withheld_on_release(), five.marks.withheld()) == ([], [3, 4])
        assert grant_all(five) == [5]

    def test_a_held_block_that_is_keyed_later_is_not_hit(self, five):
        five.withhold({3: 1})
        five.keys.seal_many([2, 3], [b"two", b"three"])
        assert (five.keys.find(b"two"), five.keys.find(b"three")) == (2, None)
        five.release([2, 3])
        assert (five.marks.withheld(), five.counts) == ([3], (0, 1, 3, 1))

    def test_another_block_of_the_same_key_is_hit_instead(self, five):
        for block in (1, 2, 3):
            five.keys.seal(block, b"key")
        five.withhold({1: 1})
        assert five.keys.find(b"key") == 2
        five.withhold({2: 1})
        assert five.keys.find(b"key") == 3

    def test_correcting_the_count_sets_it(self, five):
        five.hold([2])
        five.withhold({2: 1})
        five.release([2])
        assert five.marks.withheld() == [2]
