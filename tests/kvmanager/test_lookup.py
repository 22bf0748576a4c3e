"""Prefix lookups over all pools."""

import random
from array import array
from copy import deepcopy

import pytest

from blocks import Allocate, Commit, Free, FreeReason, Step
from kvmanager import KVManager, PoolSpec, lookup
from tests.kvmanager.test_report import random_step
from tests.kvmanager.tiny_pools import end_of


def attach(manager, engine_id, device_blocks=20, host_blocks=0, *, fingerprint="model", block_size=2):
    return manager.attach(PoolSpec(engine_id, 1, fingerprint, block_size, device_blocks, host_blocks))


def cache(manager, session, number, tokens, salt=b""):
    """Allocate, commit and free the tokens: their full blocks stay cached."""
    size = session.pool.spec.block_size
    manager.apply(session, Step(3 * number, allocates=[Allocate(1, 1, "a", salt, tokens, len(tokens))]))
    whole = tokens[session.pool.sequences[1].committed_blocks * size : len(tokens) // size * size]
    if whole:
        first = session.pool.sequences[1].committed_blocks
        assert not manager.apply(session, Step(3 * number + 1, commits=[Commit(1, first, whole)])).result.refusals
    manager.apply(session, Step(3 * number + 2, frees=[Free(1, FreeReason.FINISHED)]))


def look_up(manager, tokens, *options):
    return end_of(manager.lookup(array("i", tokens), *options))


@pytest.fixture
def manager():
    return KVManager(epoch=1)


def test_a_lookup_counts_the_prefix_of_each_pool(manager):
    sessions = {name: attach(manager, name) for name in ("c", "a", "b")}
    cache(manager, sessions["a"], 1, [1, 2, 3, 4, 5])
    cache(manager, sessions["b"], 1, [1, 2, 9, 9, 9])
    assert look_up(manager, [1, 2, 3, 4, 5, 6]) == [("a", 4, 0), ("b", 2, 0), ("c", 0, 0)]


@pytest.mark.parametrize(("tokens", "found"), [([], 0), ([1], 0), ([1, 2], 0), ([1, 2, 3], 2), ([1, 2, 3, 4], 2)])
def test_one_token_is_left_to_compute(manager, tokens, found):
    cache(manager, attach(manager, "a"), 1, [1, 2, 3, 4])
    assert look_up(manager, tokens) == [("a", found, 0)]


def test_blocks_after_the_first_host_hit_count_as_host_hits(manager):
    session = attach(manager, "a", 4, 8)
    cache(manager, session, 1, [1, 2, 3, 4, 5, 6, 7, 8])  # released from its end, so evicted from there
    manager.apply(session, Step(10, allocates=[Allocate(2, 2, "b", b"", [9, 9, 9], 3)]))
    assert look_up(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [("a", 4, 4)]
    assert look_up(manager, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == [("a", 4, 2)]


def test_only_pools_of_the_given_fingerprint_are_listed(manager):
    for name, fingerprint in (("a", "one"), ("b", "two")):
        cache(manager, attach(manager, name, fingerprint=fingerprint), 1, [1, 2, 3])
    assert look_up(manager, [1, 2, 3], b"", "two") == [("b", 2, 0)]
    assert look_up(manager, [1, 2, 3], b"", "three") == []
    assert look_up(manager, [1, 2, 3]) == [("a", 2, 0), ("b", 2, 0)]


def test_another_salt_has_no_hit(manager):
    cache(manager, attach(manager, "a"), 1, [1, 2, 3], b"tenant")
    assert look_up(manager, [1, 2, 3], b"tenant") == [("a", 2, 0)]
    assert look_up(manager, [1, 2, 3], b"other") == [("a", 0, 0)]


def test_a_disconnected_pool_is_listed_and_a_dropped_one_is_not(manager):
    sessions = [attach(manager, name) for name in ("a", "b")]
    manager.mark_disconnected(sessions[0])
    slices = manager.lookup(array("i", [1, 2, 3]))
    next(slices)
    manager.detach(sessions[1])
    assert end_of(slices) == [("a", 0, 0)]


@pytest.mark.parametrize("seed", range(50))
def test_a_lookup_has_the_hits_of_an_allocate_and_changes_nothing(manager, seed, state_of):
    draw = random.Random(seed)
    session = attach(manager, "a", 10, 8)
    for number in range(1, draw.randint(5, 30)):
        manager.apply(session, random_step(session.pool, draw, number))
    before = state_of(session.pool)
    for _ in range(20):
        tokens = [draw.randint(0, 1) for _ in range(draw.randint(1, 9))]
        pool = deepcopy(session.pool)
        result = pool.apply(Step(99, allocates=[Allocate(99, 99, "r", b"salt", tokens, 1)])).result
        if result.refusals:
            continue
        (table,) = result.tables
        brought_back = {copy.destination for copy in result.host_to_device}
        hits = table.block_ids[: table.cached_tokens // 2]
        leading = next((place for place, block in enumerate(hits) if block in brought_back), len(hits))
        assert look_up(manager, tokens, b"salt") == [("a", 2 * leading, 2 * (len(hits) - leading))]
    assert state_of(session.pool) == before


def test_keys_are_computed_once_for_equal_pools_and_only_as_far_as_one_has_them(manager, monkeypatch):
    computed = []

    def counted(*arguments):
        for key in prefix_keys(*arguments):
            computed.append(arguments[2])
            yield key

    prefix_keys = lookup.prefix_keys
    monkeypatch.setattr(lookup, "prefix_keys", counted)
    for name in ("a", "b", "c"):
        cache(manager, attach(manager, name), 1, [1] * 5)
    attach(manager, "d", block_size=3)
    look_up(manager, [1] * 1000)
    assert computed == [2, 2, 2, 3]


def test_a_long_prompt_is_looked_up_in_slices(manager):
    session = attach(manager, "a", 10_000)
    cache(manager, session, 1, [1] * 20_000)
    assert sum(1 for _ in manager.lookup(array("i", [1] * 20_000))) >= 30
