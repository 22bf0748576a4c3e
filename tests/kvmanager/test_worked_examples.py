"""Examples of papers and teaching texts."""

import pytest

from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Step
from kvmanager import Pool, PoolSpec


class Walk:
    def __init__(self, block_size, device_blocks=100):
        self.pool = Pool(PoolSpec("engine", 1, "model", block_size, device_blocks))

    def step(self, **items):
        applied = self.pool.apply(Step(self.pool.last_step + 1, **items))
        assert applied.result.refusals == ()
        assert self.pool.violations() == []
        return applied

    def table(self, sequence):
        return self.pool.sequences[sequence].table

    @property
    def held(self):
        return self.pool.device.counts.held

    @property
    def unshared(self):
        """Count the held blocks as if none were shared."""
        return sum(len(sequence.table) for sequence in self.pool.sequences.values())


def test_four_score_and_seven_years_ago_fills_blocks_of_four_and_three_and_grows_as_figure_6_of_the_paper():
    walk = Walk(block_size=4)
    words = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought"]
    tokens = list(range(len(words)))
    prompt = tokens[:7]
    walk.step(allocates=[Allocate(1, 1, "request", b"", prompt, len(prompt))])
    assert len(walk.table(1)) == 2, "one block of four, one of three"
    walk.step(lengths=[(1, 7)], commits=[Commit(1, 0, prompt[:4])])
    assert walk.pool.slots() == (7, 0, 0, 1), "one slot of the last block is free"
    walk.step(extends=[Extend(1, [(1, 8)])])
    assert len(walk.table(1)) == 2, "'fathers' takes the free slot"
    walk.step(lengths=[(1, 8)], commits=[Commit(1, 1, tokens[4:8])], extends=[Extend(1, [(1, 9)])])
    assert len(walk.table(1)) == 3, "'brought' begins a new block"
    walk.step(lengths=[(1, 9)])
    assert walk.pool.slots() == (9, 0, 0, 3)


@pytest.mark.parametrize(("generated", "held", "unshared"), [(10, 8, 20), (20, 12, 24)])
def test_four_beams_on_a_prompt_of_64_tokens(generated, held, unshared):
    walk = Walk(block_size=16)
    walk.step(allocates=[Allocate(1, 1, "request", b"", list(range(64)), 64)])
    walk.step(commits=[Commit(1, 0, list(range(64)))], forks=[Fork(1, beam, 64) for beam in (2, 3, 4)])
    walk.step(extends=[Extend(1, [(beam, 64 + generated) for beam in (1, 2, 3, 4)])])
    assert (walk.held, walk.unshared) == (held, unshared)


def test_four_sequences_share_the_16_blocks_of_a_prompt_of_256_tokens():
    walk = Walk(block_size=16)
    prompt = list(range(257))
    walk.step(allocates=[Allocate(1, 1, "request", b"", prompt[:256], 256)])
    walk.step(commits=[Commit(1, 0, prompt[:256])], forks=[Fork(1, sample, 256) for sample in (2, 3, 4)])
    assert (walk.held, walk.unshared) == (16, 64)
    walk.step(frees=[Free(sample, FreeReason.FINISHED) for sample in (1, 2, 3, 4)])
    walk.step(allocates=[Allocate(5, 5, "another request", b"", prompt, 1)])
    assert walk.pool.sequences[5].computed_tokens == 256, "and are hit after all were freed"


def test_two_samples_of_figure_8_of_the_paper_copy_the_last_block_on_the_first_write():
    walk = Walk(block_size=4)
    prompt = list(range(7))
    walk.step(allocates=[Allocate(1, 1, "request", b"", prompt, 7)])
    walk.step(commits=[Commit(1, 0, prompt[:4])], forks=[Fork(1, 2, 7)])
    assert walk.table(1) == walk.table(2)
    assert [walk.pool.device.ref_count(block) for block in walk.table(1)] == [2, 2]
    first = walk.step(extends=[Extend(1, [(1, 8)])])
    assert [tuple(copy) for copy in first.result.copies] == [(walk.table(2)[1], walk.table(1)[1])]
    second = walk.step(extends=[Extend(1, [(2, 8)])])
    assert second.result.copies == (), "the last holder writes into the block itself"
    assert walk.table(1)[0] == walk.table(2)[0]
    assert walk.table(1)[1] != walk.table(2)[1]
