"""Seals of blocks: what a process finds after the one that wrote them."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kept.seals import HELD, Sealing, Seals, SealState, seal_bytes

BLOCKS = 6


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture
def memory() -> bytearray:
    return bytearray(seal_bytes(BLOCKS))


def test_a_new_memory_has_open_seals_only(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    assert [seals.state(block) for block in range(BLOCKS + 1)] == [SealState.OPEN] * (BLOCKS + 1)
    assert (seals.cached(0), seals.withheld(), len(seals)) == ({}, [], BLOCKS)


def test_another_process_finds_what_was_sealed(memory: bytearray) -> None:
    Seals(memory, BLOCKS).seal(2, Sealing(key(7), 3, 1))
    found = Seals(memory, BLOCKS)
    assert found.sealing(2) == Sealing(key(7), 3, 1)
    assert (found.cached(1), found.cached(0)) == ({2: key(7)}, {})


def test_an_opened_block_contains_nothing(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    seals.seal(2, Sealing(key(7), 0, 0))
    seals.open([1, 2, 2])
    assert (seals.sealing(2), seals.cached(0)) == (None, {})


def test_a_seal_that_is_half_written_is_none(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    seals.seal(2, Sealing(key(7), 3, 1))
    with pytest.raises(struct.error):
        seals.seal(2, Sealing(key(8), 0, 0, checksum=None))  # type: ignore[arg-type]  # of what is written last
    assert (seals.sealing(2), Seals(memory, BLOCKS).cached(0)) == (None, {})


def test_a_withheld_block_stays_withheld(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    seals.withhold([3])
    seals.seal(3, Sealing(key(1), 0, 0))
    seals.open([3])
    assert (seals.withheld(), seals.cached(0)) == ([3], {})


def test_released_blocks_are_evicted_before_held_ones_and_tails_before_heads(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    for block, depth in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 0)):
        seals.seal(block, Sealing(key(block), depth, 0))
    seals.hold([1, 2, 3])
    seals.release([4, 5], 9)
    seals.release([6], 8)
    assert list(seals.cached(0)) == [6, 5, 4, 3, 2, 1]
    assert seals._stamp[1] == HELD


def test_a_successor_finds_no_block_held_in_the_order_of_its_predecessor(memory: bytearray) -> None:
    seals = Seals(memory, BLOCKS)
    for block in (1, 2, 3, 4):
        seals.seal(block, Sealing(key(block), 0, 0))
    seals.release([3], 7)
    seals.hold([1, 2, 5])
    seals.release([4], 1 << 40)
    before = list(seals.cached(0))
    again = Seals(memory, BLOCKS)
    assert again.settle(0) == 1  # block 5 was held and not sealed
    assert list(again.cached(0)) == before == [3, 4, 1, 2]
    again.release([3], BLOCKS + 1)
    assert list(again.cached(0)) == [4, 1, 2, 3]
    assert again.settle(0) == 0


@given(st.lists(st.tuples(st.integers(1, BLOCKS), st.sampled_from(["seal", "open", "withhold"]), st.integers(0, 9))))
def test_seals_equal_a_simple_model(changes: list[tuple[int, str, int]]) -> None:
    memory, model = bytearray(seal_bytes(BLOCKS)), dict[int, int | None]()
    seals = Seals(memory, BLOCKS)
    for block, change, number in changes:
        if change == "seal":
            seals.seal(block, Sealing(key(number), 0, 0))
            model[block] = None if model.get(block, 0) is None else number
        elif change == "open":
            seals.open([block])
            if model.get(block, 0) is not None:
                model.pop(block, None)
        else:
            seals.withhold([block])
            model[block] = None
    again = Seals(memory, BLOCKS)
    assert again.cached(0) == {block: key(one) for block, one in model.items() if one is not None}
    assert again.withheld() == sorted(block for block, one in model.items() if one is None)
