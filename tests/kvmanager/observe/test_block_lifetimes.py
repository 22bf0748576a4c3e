"""Block lifetimes, from one grant of a block to the next, compared with a reference model."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Extend, Fork, Free, FreeReason, Step
from kvmanager import BlockLifetimes, Pool, PoolSpec
from tests.kvmanager.test_report import random_step

SIZE = 2


def pool_of(device_blocks, host_blocks=0):
    return Pool(PoolSpec("engine", 1, "model", SIZE, device_blocks, host_blocks))


def apply(pool, lives, now, **items):
    """Apply a Step and return its lifetimes, idle times and gaps, each sorted."""
    applied = pool.apply(Step(int(now), **items))
    assert applied.result.refusals == ()
    observed = lives.on_step(applied, now)
    return observed and tuple(map(sorted, observed))


def all_lives():
    return BlockLifetimes(1, random.Random(0).random)


def prompt(sequence, tokens):
    return Allocate(sequence, sequence, f"r{sequence}", b"", tokens, len(tokens))


class Twin:
    """A reference model: records a tier's grants and computes lifetimes from its own tables."""

    def __init__(self, pool, monkeypatch):
        self._granted = []
        self._begun, self._touched, self._found = {}, {}, set()
        for name in ("grant", "grant_many"):
            monkeypatch.setattr(pool.device, name, self._spied(getattr(pool.device, name)))

    def _spied(self, method):
        def spy(*arguments):
            answer = method(*arguments)
            self._granted += answer if isinstance(answer, list) else [answer]
            return answer

        return spy

    def on_step(self, applied, now):
        granted = set(self._granted)
        self._granted.clear()
        lifetimes, idle, gaps = [], [], []
        for block in granted & self._begun.keys():
            lifetimes.append(now - self._begun[block])
            idle.append(now - self._touched[block])
        for block in granted:
            self._begun[block] = self._touched[block] = now
            self._found.discard(block)
        found = {
            block for change in applied.result.tables for block in change.block_ids[: change.cached_tokens // SIZE]
        }
        for block in found - granted:
            if block in self._found:
                gaps.append(now - self._touched[block])
            if block in self._begun:
                self._found.add(block)
                self._touched[block] = now
        return lifetimes, idle, gaps


@pytest.mark.parametrize("seed", range(12))
def test_lifetimes_equal_those_of_a_reference_model(seed, monkeypatch):
    draw, pool = random.Random(seed), pool_of(14, seed % 3 * 4)
    lives, twin = all_lives(), Twin(pool, monkeypatch)
    seen = Counter()
    for number in range(1, 800):
        # The model does not distinguish blocks swapped in from blocks hit in the same Step.
        applied = pool.apply(replace(random_step(pool, draw, number), swap_ins=()))
        observed = lives.on_step(applied, float(number)) or ([], [], [])
        expected = twin.on_step(applied, float(number))
        assert list(map(sorted, observed)) == list(map(sorted, expected)), number
        seen.update(lifetimes=len(expected[0]), gaps=len(expected[2]))
    assert seen["lifetimes"] > 20
    assert seen["gaps"] > 0


def test_a_lifetime_ends_when_its_block_is_granted_again_not_when_released():
    pool, lives = pool_of(2), all_lives()
    assert apply(pool, lives, 1.0, allocates=[prompt(1, [0, 1, 0, 1])]) == ([], [], [])
    assert apply(pool, lives, 4.0, frees=[Free(1, FreeReason.FINISHED)]) is None
    assert apply(pool, lives, 10.0, allocates=[prompt(2, [1])]) == ([9.0], [9.0], [])
    assert apply(pool, lives, 11.0, extends=[Extend(2, [(2, 3)])]) == ([10.0], [10.0], [])


def test_gaps_are_reported_from_the_second_hit_on_and_idle_time_since_the_last():
    pool, lives = pool_of(2), all_lives()
    apply(pool, lives, 1.0, allocates=[prompt(1, [0, 1])])
    apply(pool, lives, 2.0, commits=[Commit(1, 0, [0, 1])], frees=[Free(1, FreeReason.FINISHED)])
    assert apply(pool, lives, 5.0, allocates=[prompt(2, [0, 1, 0])]) == ([], [], [])
    apply(pool, lives, 6.0, frees=[Free(2, FreeReason.FINISHED)])
    assert apply(pool, lives, 9.0, allocates=[prompt(3, [0, 1, 0])]) == ([4.0], [4.0], [4.0])
    apply(pool, lives, 10.0, frees=[Free(3, FreeReason.FINISHED)])
    assert apply(pool, lives, 20.0, allocates=[prompt(4, [1, 1, 1])]) == ([11.0, 19.0], [11.0, 11.0], [])


def test_a_copy_starts_a_lifetime_and_its_source_continues():
    pool, lives = pool_of(3), all_lives()
    apply(pool, lives, 1.0, allocates=[prompt(1, [0])])
    apply(pool, lives, 2.0, forks=[Fork(1, 2, 1)])
    assert apply(pool, lives, 3.0, extends=[Extend(1, [(2, 2)])]) == ([], [], [])
    apply(pool, lives, 4.0, frees=[Free(1, FreeReason.FINISHED), Free(2, FreeReason.FINISHED)])
    assert apply(pool, lives, 9.0, allocates=[prompt(3, [1, 1, 1, 1, 1])]) == ([6.0, 8.0], [6.0, 8.0], [])


def test_a_block_copied_back_from_the_host_starts_a_lifetime():
    pool, lives = pool_of(2, 2), all_lives()
    apply(pool, lives, 1.0, allocates=[prompt(1, [0, 1])])
    apply(pool, lives, 2.0, swap_outs=[1])
    assert apply(pool, lives, 3.0, swap_ins=[1]) == ([], [], [])  # into the other block
    apply(pool, lives, 4.0, commits=[Commit(1, 0, [0, 1])], frees=[Free(1, FreeReason.FINISHED)])
    evicting = apply(pool, lives, 6.0, allocates=[prompt(2, [1, 1, 1])])
    assert evicting == ([3.0, 5.0], [3.0, 5.0], [])
    apply(pool, lives, 7.0, frees=[Free(2, FreeReason.FINISHED)])
    found_in_host = apply(pool, lives, 8.0, allocates=[prompt(3, [0, 1, 1])])
    assert found_in_host == ([2.0, 2.0], [2.0, 2.0], [])


@pytest.mark.parametrize("held", [False, True])
def test_the_lifetime_of_a_condemned_block_has_no_end(held):
    pool, lives = pool_of(3), all_lives()
    apply(pool, lives, 1.0, allocates=[prompt(1, [0, 1, 0, 1])])
    free = [Free(1, FreeReason.FINISHED)]
    apply(pool, lives, 2.0, commits=[Commit(1, 0, [0, 1, 0, 1])], frees=[] if held else free)
    condemn = Condemn(1, [1], CondemnReason.HIT)
    assert apply(pool, lives, 3.0, condemns=[condemn], frees=free if held else []) is None
    assert apply(pool, lives, 10.0, allocates=[prompt(2, [1, 1, 1, 1])]) == ([9.0], [9.0], [])


def test_a_condemned_host_block_ends_no_lifetime_of_the_device_block_with_its_number():
    pool, lives = pool_of(2, 2), all_lives()
    apply(pool, lives, 1.0, allocates=[prompt(1, [0, 1])])
    apply(pool, lives, 2.0, condemns=[Condemn(0, [1], CondemnReason.COPY, host=True)])
    apply(pool, lives, 3.0, frees=[Free(1, FreeReason.FINISHED)])
    assert apply(pool, lives, 10.0, allocates=[prompt(2, [1, 1, 1, 1])]) == ([9.0], [9.0], [])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_sample_has_the_configured_share_and_follows_its_seed(share):
    def followed(seed):
        pool, lives = pool_of(1000), BlockLifetimes(share, random.Random(seed).random)
        ended = []
        for number in range(1, 21):
            observed = apply(pool, lives, float(number * 2), allocates=[prompt(number, [0] * 1000)])
            ended.append(len(observed[0]))
            apply(pool, lives, float(number * 2 + 1), frees=[Free(number, FreeReason.FINISHED)])
        return ended

    first = followed(1)
    assert followed(1) == first
    assert followed(2) != first
    assert sum(first[2:]) == pytest.approx(18 * 500 * share, rel=0.1)
