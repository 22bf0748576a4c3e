"""The index from keys to blocks, compared with a list of blocks for each key."""

import random

import pytest

from kvmanager.tier.key_index import KeyIndex
from kvmanager.tier.marks import WITHHELD, BlockMarks

BLOCKS = 12
KEYS = [bytes([number]) * 32 for number in range(1, 4)]


def new_index():
    index = KeyIndex(BLOCKS, BlockMarks(BLOCKS))
    index.grow(BLOCKS)
    return index


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_one_key_stay_in_sealing_order_through_random_seals_and_removals(seed):
    draw, index = random.Random(seed), new_index()
    model = {key: [] for key in KEYS}
    for _ in range(300):
        block = draw.randint(1, BLOCKS)
        if (key := index.by_block[block]) is None:
            key = draw.choice(KEYS)
            index.seal(block, key)
            model[key].append(block)
        elif draw.random() < 0.3:
            index.seal(block, key)  # again: no effect
        else:
            assert index.remove(block) == key
            model[key].remove(block)
        for key, blocks in model.items():
            assert index.blocks_of(key) == blocks
            assert index.find(key) == (blocks[0] if blocks else None)
        assert list(index.entries()) == [(key, block) for key in dict(index.entries()) for block in model[key]]
        assert [fault for one in range(1, BLOCKS + 1) for fault in index.block_faults(one)] == []
        assert index.violations() == []


@pytest.mark.parametrize("damaged", [1, 2, 3])
@pytest.mark.parametrize("wrong", [KEYS[1], KEYS[2]])
def test_a_block_whose_key_was_damaged_leaves_the_others_of_its_key(damaged, wrong):
    index = new_index()
    for block in (1, 2, 3):
        index.seal(block, KEYS[0])
    index.seal(4, KEYS[1])
    index.by_block[damaged] = wrong
    index.remove(damaged)
    assert index.blocks_of(KEYS[0]) == [block for block in (1, 2, 3) if block != damaged]
    assert index.find(KEYS[1]) == 4
    index.seal(damaged, KEYS[2])
    assert index.blocks_of(KEYS[2]) == [damaged]
    assert index.violations() == []


def test_a_block_behind_a_damaged_one_that_is_out_of_circulation_is_indexed():
    marks = BlockMarks(BLOCKS)
    index = KeyIndex(BLOCKS, marks)
    index.grow(BLOCKS)
    index.seal(1, KEYS[0])
    index.by_block[1] = b"no block's"
    index.unindex(1)
    index.clear(1)
    marks.set(1, WITHHELD)
    index.seal(2, KEYS[0])
    assert index.find(KEYS[0]) == 2
    assert index.block_faults(2) == []
    index.remove(2)
    assert index.find(KEYS[0]) is None
