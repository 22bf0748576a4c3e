"""Buddy allocation, against a list of the blocks in use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.baselines.buddy import BuddyAllocator
from bench.papers.baselines.slabs import Slab


def test_a_slab_has_the_next_power_of_two_of_blocks() -> None:
    buddies = BuddyAllocator(16)
    assert [buddies.allocate(blocks) for blocks in (3, 1, 4)] == [Slab(0, 4), Slab(4, 1), Slab(8, 4)]
    assert buddies.free_blocks == 7


def test_opt_13b_holds_seven_sequences_of_2048_tokens() -> None:
    """983 blocks of 16 begin as 512 + 256 + 128 + ... blocks, and a slab of 128 lies in one of these parts."""
    buddies = BuddyAllocator(983)
    slabs = [buddies.allocate(128) for _ in range(8)]
    assert slabs[:7] == [Slab(start, 128) for start in (768, 512, 640, 0, 128, 256, 384)]
    assert slabs[7] is None
    assert buddies.free_blocks == 983 - 7 * 128


def test_freed_buddies_merge_until_the_part_is_whole() -> None:
    buddies = BuddyAllocator(8)
    slabs = [slab for _ in range(8) if (slab := buddies.allocate(1))]
    assert buddies.allocate(1) is None
    for slab in slabs[::2] + slabs[1::2]:
        buddies.release(slab)
    assert buddies.allocate(8) == Slab(0, 8)


def test_free_blocks_that_are_no_buddies_cannot_be_one_slab() -> None:
    buddies = BuddyAllocator(4)
    slabs = [slab for _ in range(4) if (slab := buddies.allocate(1))]
    buddies.release(slabs[1])
    buddies.release(slabs[2])
    assert buddies.free_blocks == 2
    assert buddies.allocate(2) is None


@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_a_request_larger_than_the_memory_is_refused(blocks: int) -> None:
    assert BuddyAllocator(blocks).allocate(blocks + 1) is None


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_slabs_are_disjoint_and_all_blocks_return(blocks: int, calls: list[tuple[bool, int]]) -> None:
    buddies, held = BuddyAllocator(blocks), list[Slab]()
    for release, number in calls:
        if release and held:
            buddies.release(held.pop(number % len(held)))
        elif slab := buddies.allocate(number):
            held.append(slab)
        buddies.check()
        covered = [block for slab in held for block in range(slab.start, slab.start + slab.blocks)]
        assert len(covered) == len(set(covered)) == blocks - buddies.free_blocks
        assert set(covered) <= set(range(blocks))
    for slab in held:
        buddies.release(slab)
    buddies.check()
    assert buddies.free_blocks == blocks
