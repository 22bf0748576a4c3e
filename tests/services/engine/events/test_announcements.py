"""What is announced equals what a prompt can hit, after random Steps of every kind."""

import gc
from functools import cached_property

from hypothesis import strategies as st
from hypothesis.stateful import rule

from blocks import Commit, Condemn, CondemnReason, Free, FreeReason, Reset, Step
from kvmanager import Pool, PoolSpec, adopt, report_of
from services.engine.events.announcements import Announcements
from services.engine.events.changes import Cleared, KeyPlace, Medium, Removed, Stored
from services.engine.events.origins import salt_digest
from tests.kvmanager.random_runs import random_runs
from tests.kvmanager.test_random_kinds import RandomKinds
from tests.kvmanager.test_random_steps import SIZE, RandomSteps
from tests.kvmanager.tiny_pools import allocate, end_of
from tests.services.engine.events.followed_keys import FollowedKeys


class FollowedPool:
    """Follows a pool: each Step's changes go to a follower, and to a second one that begins with a snapshot."""

    def __init__(self, pool):
        self.pool = pool
        self.announcements = Announcements(pool.state, {}, salts=b"key")
        self.follower, self.late = FollowedKeys(), None
        self.snapshot, self.missed = None, []
        self.apply_to_pool, pool.apply = pool.apply, self.apply

    def apply(self, step):
        self.announcements.before(step)
        applied = self.apply_to_pool(step)
        self.announcements.applied(step, applied.result.refusals)
        changes = self.announcements.changes()
        self.follower.apply(changes)
        if self.late and self.snapshot is None:
            self.late.apply(changes)
        self.missed.append(changes)
        return applied

    def begin_snapshot(self):
        self.snapshot, self.late, self.missed = self.announcements.snapshot(), FollowedKeys(strict=False), []

    def next_slice(self):
        if self.snapshot is None:
            return
        try:
            self.late.apply(next(self.snapshot))
        except StopIteration:
            self.snapshot = None
            for changes in self.missed:
                self.late.apply(changes)

    def expected(self, keys):
        """Return what each place must have, given the keys of contents."""
        main = self.pool.state
        known = {key for key in keys.values() if main.device.keys.find(key) or main.host.keys.find(key)}
        reachable = set()
        for content, key in sorted(keys.items(), key=lambda item: len(item[0])):
            parent = keys.get(content[:-SIZE])
            if key in known and (len(content) == 2 + SIZE or parent in reachable):
                reachable.add(key)
        found = {}
        for number, kind in enumerate(main.kinds):
            for medium, tier in ((Medium.GPU, kind.device), (Medium.CPU, kind.host)):
                found[KeyPlace(number, medium)] = {
                    key for key in keys.values() if tier.keys.find(key) and (number or key in reachable)
                }
        return found

    def check(self, keys):
        expected = self.expected(keys)
        assert {place: self.follower.places[place] for place in expected} == expected
        assert len(self.announcements) == len(set().union(*expected.values()))
        assert self.announcements.hidden == 0
        if self.late and self.snapshot is None:
            assert {place: self.late.places[place] for place in expected} == expected


class Followed:
    """A random run whose pool is followed. Nothing damages it: no audit runs at an engine."""

    @cached_property
    def followed(self):
        return FollowedPool(self.pool)

    def apply(self, **items):
        assert self.followed, "followed from before the first Step"
        super().apply(**items)

    @rule()
    def begin_a_snapshot(self):
        self.followed.begin_snapshot()

    @rule(slices=st.integers(1, 3))
    def take_slices(self, slices):
        for _ in range(slices):
            self.followed.next_slice()
        self.followed.check(self.keys)

    def sound_blocks(self):
        return []

    def sound_blocks_of_windows(self):
        return []

    def check_tiers(self):
        super().check_tiers()
        self.followed.check(self.keys)


class FollowedSteps(Followed, RandomSteps):
    """Random Steps without window kinds."""


class FollowedKinds(Followed, RandomKinds):
    """Random Steps with window kinds."""


FollowedSteps.TestCase.settings = random_runs(examples=150, steps=9)
FollowedKinds.TestCase.settings = random_runs(examples=100, steps=9)
TestFollowedSteps = FollowedSteps.TestCase
TestFollowedKinds = FollowedKinds.TestCase


def followed_pool(salts=b"key"):
    pool = Pool(PoolSpec("engine", 1, "model", 2, 8, 4))
    announcements = Announcements(pool.state, {}, salts=salts)

    def step(**items):
        one = Step(pool.last_step + 1, **items)
        announcements.before(one)
        announcements.applied(one, pool.apply(one).result.refusals)
        return announcements.changes()

    return pool, announcements, step


def salted(sequence, tokens, salt):
    return allocate(sequence, tokens)._replace(salt=salt)


def test_a_chain_is_stored_in_one_change_with_its_tokens_and_a_digest_of_its_salt():
    pool, announcements, step = followed_pool()
    step(allocates=[salted(1, [1, 2, 3, 4, 5], b"tenant")])
    (stored,) = step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    keys = pool.device.keys.keys_of([1, 2])
    assert stored == Stored(KeyPlace(0, Medium.GPU), None, keys, stored.tokens, salt_digest(b"tenant", b"key"))
    assert stored.token_ids.tolist() == [1, 2, 3, 4]
    assert b"tenant".hex() not in stored.salt
    assert announcements.origin(keys[1]).parent == keys[0]


def test_chains_with_a_salt_are_omitted_where_the_setting_says_so():
    _, announcements, step = followed_pool(salts=None)
    step(allocates=[salted(1, [1, 2, 3], b"tenant"), salted(2, [1, 2, 3], b"")])
    (stored,) = step(commits=[Commit(1, 0, [1, 2]), Commit(2, 0, [1, 2])])
    assert stored.salt == ""
    assert (len(announcements), announcements.hidden) == (1, 1)
    step(frees=[Free(1, FreeReason.FINISHED)], pins=[Reset()])
    assert announcements.hidden == 0


def test_a_key_is_removed_only_with_its_last_block():
    _, _, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3]), allocate(2, [1, 2, 3])])
    assert len(step(commits=[Commit(1, 0, [1, 2]), Commit(2, 0, [1, 2])])) == 1
    assert step(condemns=[Condemn(1, [1], CondemnReason.HIT)]) == []
    (removed,) = step(condemns=[Condemn(2, [3], CondemnReason.HIT)])
    assert isinstance(removed, Removed)


def test_blocks_behind_a_condemned_one_are_withdrawn_and_stored_again_when_it_is_back():
    pool, _, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3, 4, 5])])
    step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    first, second = pool.device.keys.keys_of([1, 2])
    (removed,) = step(condemns=[Condemn(1, [1], CondemnReason.HIT)])
    assert removed == Removed(KeyPlace(0, Medium.GPU), [second, first])
    step(allocates=[allocate(2, [1, 2, 7])])
    (stored,) = step(commits=[Commit(2, 0, [1, 2])])
    assert stored.keys == [first, second]


def test_a_reset_is_one_change_and_what_follows_in_its_step_is_stored_behind_it():
    _, announcements, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3, 4, 5]), allocate(2, [7, 8, 9])])
    step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    assert step(pins=[Reset()]) == [Cleared()]
    assert len(announcements) == 0
    assert step(pins=[Reset()]) == []


def adopted_pool():
    """Return a pool with two keys of a chain, the second indexed before the first, and their origins."""
    pool, announcements, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3, 4, 5])])
    step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    step(frees=[Free(1, FreeReason.FINISHED)])
    report = report_of(pool)
    report.device.keyed = dict(reversed(report.device.keyed.items()))
    keys = pool.device.keys.keys_of([1, 2])
    return end_of(adopt(pool.spec, report)), {key: announcements.origin(key) for key in keys}


def test_adopted_blocks_are_in_the_snapshot_parents_first():
    pool, origins = adopted_pool()
    announcements = Announcements(pool.state, origins, salts=b"key")
    changes = [change for part in announcements.snapshot() for change in part]
    assert changes[0] == Cleared()
    assert changes[1].keys == list(origins)


def test_adopted_blocks_that_come_in_any_order_are_announced_parents_first():
    pool, origins = adopted_pool()
    announcements = Announcements(pool.state, {}, salts=b"key")
    assert (len(announcements), announcements.hidden) == (0, 2)
    announcements._learn((key, tuple(origin)) for key, origin in origins.items())
    pool.device.keys.journal = list(reversed(origins))
    (stored,) = announcements.changes()
    assert stored.keys == list(origins)
    assert announcements.hidden == 0


def test_an_evicted_key_is_stored_on_the_host_before_it_is_removed_from_the_device():
    _, announcements, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3])])
    (stored,) = step(commits=[Commit(1, 0, [1, 2])])
    step(frees=[Free(1, FreeReason.FINISHED)])
    host, device = step(allocates=[allocate(2, list(range(10, 25)))])
    assert host == Stored(KeyPlace(0, Medium.CPU), None, stored.keys, stored.tokens, "")
    assert device == Removed(KeyPlace(0, Medium.GPU), stored.keys)
    assert len(announcements) == 1


def test_nothing_is_kept_of_a_key_that_has_no_block():
    _, announcements, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3, 4, 5])])
    (stored,) = step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    step(frees=[Free(1, FreeReason.FINISHED)], pins=[Reset()])
    assert [announcements.origin(key) for key in stored.keys] == [None, None]
    assert len(announcements._keys) == 0


def test_known_keys_are_no_work_of_the_garbage_collector():
    _, announcements, step = followed_pool()
    step(allocates=[allocate(1, [1, 2, 3, 4, 5])])
    (stored,) = step(commits=[Commit(1, 0, [1, 2, 3, 4])])
    gc.collect()
    assert not any(gc.is_tracked(announcements.fields(key)) for key in stored.keys)


def test_a_digest_of_a_salt_depends_on_a_key_that_nobody_knows():
    assert salt_digest(b"tenant", b"one") != salt_digest(b"tenant", b"other")
    assert salt_digest(b"", b"one") == ""
