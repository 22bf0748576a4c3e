"""Blocks blamed by an audit are never hit, nor are copies of them."""

import pytest

PROMPT = [1, 2, 3]


@pytest.fixture
def small(new_pool):
    return new_pool(block_size=2, host_blocks=8)


def hit_tokens(pool, prompt=(*PROMPT, 4)):
    return pool.allocate(90, list(prompt)).cached_tokens


def test_a_blamed_block_that_is_committed_alone_is_not_hit(small):
    small.allocate(1, PROMPT)
    small.pool.withhold([1], [])
    small.commit(1, PROMPT)
    assert hit_tokens(small) == 0


def test_a_blamed_block_is_not_hit_in_the_other_tier_nor_after_its_swap_in(small):
    small.prefill(1, PROMPT)
    small.pool.withhold([1], [])
    small.swap_out(1)
    assert small.allocate(2, [*PROMPT, 4]).cached_tokens == 0
    small.swap_in(1)
    assert hit_tokens(small) == 0


def test_a_committed_copy_of_a_blamed_block_is_not_hit(small):
    small.allocate(1, [1])
    small.fork(1, 2, 1)
    small.pool.withhold([1], [])
    assert [copy.source for copy in small.extend(1, {2: 2}).result.copies] == [1]
    small.commit(2, [1, 2])
    assert hit_tokens(small) == 0


def test_a_sound_twin_does_not_share_the_copy_of_a_blamed_block(small):
    """Two sequences of a group with an equal block each; the first block is blamed."""
    small.allocate(1, [1])
    small.fork(1, 2, 1)
    small.extend(1, {1: 2, 2: 2})
    small.commit(1, [1, 2])
    small.commit(2, [1, 2])
    assert small.table(1) != small.table(2)
    small.pool.withhold(small.table(1), [])
    small.swap_out(1)
    assert small.table(1) != small.table(2), "each has its own copy"
