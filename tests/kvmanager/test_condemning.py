"""Condemned blocks lose their keys at once and leave circulation, held ones on release."""

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Free, FreeReason, Step, StepItem, StepRefusal, WindowKind
from kvmanager import KVManager, Pool, PoolSpec, Tier, adopt, limits, report_of
from kvmanager.effects import Condemned, effect_of
from kvmanager.verbs.condemning import withhold_known
from tests.kvmanager.tiny_pools import FIVE, end_of, ids

PROMPT = [*FIVE, 6, 7]  # three whole blocks and a tail


@pytest.fixture
def small(new_pool):
    """Eight device blocks and four host blocks of two tokens."""
    return new_pool(8, 2, host_blocks=4)


def cached_tokens(pool, sequence, prompt=PROMPT):
    return pool.allocate(sequence, prompt).cached_tokens


def withheld(tier):
    return tier.marks.withheld()


class TestStates:
    def test_a_cached_block_is_withheld_at_once_and_a_later_prompt_misses_it(self, small):
        small.cache(1, PROMPT)
        small.condemn(2)
        assert withheld(small.device) == [2]
        assert small.device.key(2) is None
        assert cached_tokens(small, 2) == 2

    def test_a_free_block_is_withheld_at_once_and_never_handed_out(self, small):
        small.condemn(1, 3, 8)
        assert (small.device.counts, small.order()) == ((5, 0, 0, 3), [2, 4, 5, 6, 7])
        assert small.allocate(1, [0] * 10).block_ids == [2, 4, 5, 6, 7]
        assert small.device.available == 0
        assert small.refuse(allocates=[Allocate(2, 2, "r", b"", [1], 1)]) is StepRefusal.OUT_OF_BLOCKS
        small.free(1)
        assert small.order() == [7, 6, 5, 4, 2]

    def test_a_held_block_stays_in_its_table_and_is_withheld_on_release(self, small):
        small.prefill(1, PROMPT)
        small.condemn(2, sequence=1)
        assert (small.table(1), withheld(small.device)) == ([1, 2, 3, 4], [])
        assert cached_tokens(small, 2) == 2
        small.free(1)
        assert withheld(small.device) == [2]
        assert small.device.counts == (2, 1, 4, 1)

    def test_a_pinned_block_is_withheld_when_it_is_unpinned(self, small):
        small.prefill(1, PROMPT)
        small.pin("p", 1, 2)
        small.free(1)
        small.condemn(1)
        assert withheld(small.device) == []
        assert cached_tokens(small, 2) == 0
        small.unpin("p")
        assert withheld(small.device) == [1]

    def test_a_block_that_is_shared_is_withheld_after_its_last_holder(self, small):
        small.prefill(1, PROMPT)
        small.fork(1, 2, 7)
        small.condemn(3)
        small.free(1)
        assert withheld(small.device) == []
        small.free(2)
        assert withheld(small.device) == [3]

    def test_a_block_that_is_condemned_before_its_commit_is_not_hit(self, small):
        small.allocate(1, PROMPT)
        small.condemn(1)
        small.commit(1, PROMPT)
        assert cached_tokens(small, 2) == 0

    def test_a_block_of_a_key_that_another_block_has_too_leaves_the_other_one_findable(self, small):
        small.allocate(1, PROMPT)
        small.allocate(2, PROMPT)
        small.commit(1, PROMPT)
        small.commit(2, PROMPT)
        assert small.table(1) != small.table(2)
        small.condemn(*small.table(1)[:2])
        small.free(1, 2)
        table = small.allocate(3, PROMPT)
        assert (table.cached_tokens, table.block_ids[:3]) == (6, [5, 6, 3])

    def test_a_block_that_a_reset_forgot_is_withheld_on_release(self, small):
        small.prefill(1, PROMPT)
        small.reset()
        small.condemn(1)
        small.free(1)
        assert withheld(small.device) == [1]

    def test_a_withheld_or_marked_block_does_not_change_and_has_no_effect(self, small):
        small.cache(1, PROMPT)
        small.prefill(2, PROMPT)
        small.condemn(1, 8)
        before = small.state()
        assert small.condemn(1, 8).effects == []
        assert small.state() == before
        assert [effect_of(one).blocks for one in small.condemn(8, 2, 2, 1).effects] == [[2]]

    def test_what_an_audit_withholds_later_may_have_been_condemned(self, small):
        small.condemn(5)
        small.pool.withhold([5], [])
        assert (small.device.counts, small.pool.violations()) == ((7, 0, 0, 1), [])


class TestCopies:
    def test_the_new_block_of_a_condemned_prefix_takes_the_key(self, small):
        small.cache(1, PROMPT)
        small.condemn(1)
        new = small.prefill(2, PROMPT)
        assert (new.cached_tokens, 1 in new.block_ids) == (0, False)
        small.free(2)
        table = small.allocate(3, PROMPT)
        assert (table.cached_tokens, table.block_ids[:3]) == (6, [new.block_ids[0], 2, 3])

    def test_a_group_with_a_condemned_block_is_swapped_and_its_copy_is_not_hit(self, small):
        small.prefill(1, FIVE)
        small.condemn(1)
        small.swap_out(1)
        assert withheld(small.device) == [1]
        assert cached_tokens(small, 2) == 0
        small.free(2)
        small.swap_in(1)
        assert withheld(small.host) == []
        assert cached_tokens(small, 3) == 0

    def test_a_swapped_group_whose_host_block_is_condemned_returns_and_leaves_it_behind(self, small):
        small.prefill(1, FIVE)
        small.reset()
        small.swap_out(1)
        small.condemn(small.table(1)[0], host=True, sequence=1)
        small.swap_in(1)
        assert withheld(small.host) == [1]
        assert small.host.counts == (3, 0, 0, 1)

    def test_a_condemned_host_block_leaves_the_device_block_of_its_number_and_key(self, small):
        small.prefill(1, FIVE)
        small.swap_out(1)
        small.free(1)
        assert small.host.counts.cached == 2
        small.condemn(1, host=True)
        assert withheld(small.host) == [1]
        assert withheld(small.device) == []
        assert small.host.counts == (2, 1, 0, 1)
        assert cached_tokens(small, 2) == 4
        small.free(2)
        small.condemn(1)
        assert cached_tokens(small, 3) == 0, "neither tier has the first block now"

    def test_a_fork_shares_a_condemned_block_and_its_copy_on_write_is_not_hit(self, small):
        small.allocate(1, [1])
        small.condemn(1)
        small.fork(1, 2, 1)
        assert [copy.source for copy in small.extend(1, {2: 2}).result.copies] == [1]
        small.commit(2, [1, 2])
        assert cached_tokens(small, 3) == 0
        small.free(1, 2, 3)
        assert withheld(small.device) == [1]


class TestOrder:
    def test_condemns_come_first_so_that_an_allocate_of_the_same_step_misses(self, small):
        small.cache(1, PROMPT)
        items = {"allocates": [Allocate(2, 2, "r", b"", PROMPT, 7)]}
        applied = small.accept(condemns=[Condemn(0, [1], CondemnReason.ADOPTION)], **items)
        assert applied.result.tables[0].cached_tokens == 0
        assert [effect[0] for effect in applied.effects] == [StepItem.CONDEMN, StepItem.ALLOCATE]

    def test_a_free_of_the_same_step_withholds(self, small):
        small.prefill(1, PROMPT)
        small.accept(condemns=[Condemn(1, [3], CondemnReason.HIT)], frees=[Free(1, FreeReason.FAILED)])
        assert withheld(small.device) == [3]

    def test_the_result_does_not_list_the_blocks(self, small):
        result = small.condemn(1, 2).result
        assert (result.withheld_blocks, result.host_withheld_blocks, result.available_blocks) == ((), (), 6)

    def test_an_effect_has_the_group_of_a_sequence_that_lives(self, small):
        small.allocate(1, FIVE, group=7)
        assert effect_of(small.condemn(1, sequence=1).effects[0]) == Condemned(1, 7, [1], CondemnReason.HIT, False, 0)
        assert effect_of(small.condemn(2, sequence=9).effects[0]) == Condemned(9, 0, [2], CondemnReason.HIT, False, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("item", "detail"),
        [
            (Condemn(1, [], CondemnReason.HIT), "blocks must not be empty"),
            (Condemn(1, [1, 0], CondemnReason.HIT), "blocks must be between 1 and 8, the device blocks, not 0"),
            (Condemn(1, [1, 9], CondemnReason.HIT), "blocks must be between 1 and 8, the device blocks, not 9"),
            (Condemn(1, [5], CondemnReason.HIT, host=True), "blocks must be between 1 and 4, the host blocks, not 5"),
            (Condemn(1, [1], CondemnReason.HIT, kind=1), "kind must be between 0 and 0, not 1"),
            (Condemn(1, [1], CondemnReason.HIT, kind=-1), "kind must be between 0 and 0, not -1"),
        ],
    )
    def test_a_number_out_of_range_is_refused_by_name_and_changes_nothing(self, small, item, detail):
        small.cache(1, FIVE)
        assert small.refuse(condemns=[item]) is StepRefusal.INVALID
        (refusal,) = small.apply(condemns=[item]).result.refusals
        assert (refusal.item, refusal.position, refusal.detail) == (StepItem.CONDEMN, 0, detail)

    def test_a_refused_item_leaves_those_beside_it(self, small):
        items = [Condemn(0, blocks, CondemnReason.COPY) for blocks in ([1], [2, 99], [3])]
        assert [one.position for one in small.apply(condemns=items).result.refusals] == [1]
        assert withheld(small.device) == [1, 3]

    def test_a_block_out_of_range_behind_many_changes_nothing(self, new_pool):
        pool = new_pool(2000)
        assert pool.refuse(condemns=[Condemn(0, [*ids(1, 2000), 2001], CondemnReason.COPY)]) is StepRefusal.INVALID


class TestReports:
    @pytest.mark.parametrize("held", [False, True])
    def test_adoption_after_a_condemn_keeps_the_block_withheld(self, small, held):
        small.prefill(1, PROMPT)
        if not held:
            small.free(1)
        small.condemn(2, 7)
        small.condemn(4, host=True)
        again = end_of(adopt(small.pool.spec, report_of(small.pool)))
        assert again.violations() == []
        assert report_of(again) == report_of(small.pool)
        if held:
            again.apply(Step(again.last_step + 1, frees=[Free(1, FreeReason.FINISHED)]))
        assert (withheld(again.device), withheld(again.host)) == ([2, 7], [4])

    def test_an_audit_finds_no_violation(self):
        manager = KVManager(epoch=1)
        session = manager.attach(PoolSpec("engine", 1, "model", 2, 8, 4))
        manager.apply(session, Step(1, allocates=[Allocate(1, 1, "r", b"", PROMPT, 7)]))
        condemns = [Condemn(1, [2, 8], CondemnReason.HIT), Condemn(0, [1], CondemnReason.HIT, host=True)]
        work = manager.audit(session)
        assert next(work) == []  # it follows the Steps from here on
        manager.apply(session, Step(2, condemns=condemns, commits=[Commit(1, 0, PROMPT[:6])]))
        assert [one for found in work for one in found] == []
        manager.apply(session, Step(3, frees=[Free(1, FreeReason.FINISHED)]))
        assert [one for found in manager.audit(session) for one in found] == []
        assert session.pool.device.counts.withheld == 2

    def test_totals_count_blocks_once_by_tier_and_reason(self):
        manager = KVManager(epoch=1)
        session = manager.attach(PoolSpec("engine", 1, "model", 2, 8, 4, windows=(WindowKind("w", 4, 6, 2),)))
        condemns = [
            Condemn(0, [1, 2, 2], CondemnReason.HIT),
            Condemn(0, [2, 3], CondemnReason.COPY),
            Condemn(0, [3], CondemnReason.HIT, kind=1),
            Condemn(0, [1], CondemnReason.HIT, host=True),
            Condemn(0, [9], CondemnReason.ADOPTION),
        ]
        assert len(manager.apply(session, Step(1, condemns=condemns)).result.refusals) == 1
        device, host = False, True
        assert session.totals.condemned_blocks == {
            (device, CondemnReason.HIT): 3,
            (device, CondemnReason.COPY): 1,
            (host, CondemnReason.HIT): 1,
        }


class TestWindowKinds:
    def pool(self):
        """A sequence whose three whole blocks are cached in both kinds, and its pool."""
        kind = WindowKind("window", tokens=4, device_blocks=6, host_blocks=2)
        pool = Pool(PoolSpec("engine", 1, "model", 2, 8, 4, windows=(kind,)))
        pool.apply(Step(1, allocates=[Allocate(1, 1, "r", b"", PROMPT, 7)]))
        frees = [Free(1, FreeReason.FINISHED)]
        applied = pool.apply(Step(2, commits=[Commit(1, 0, PROMPT[:6])], frees=frees))
        assert applied.result.refusals == ()
        return pool

    def hit(self, pool):
        applied = pool.apply(Step(pool.last_step + 1, allocates=[Allocate(2, 2, "r", b"", PROMPT, 7)]))
        assert pool.violations() == []
        return applied.result.tables[0].cached_tokens

    def test_a_block_of_a_window_kind_is_withheld_there_and_ends_the_prefixes_that_need_it(self):
        pool = self.pool()
        applied = pool.apply(Step(3, condemns=[Condemn(0, [3], CondemnReason.HIT, kind=1)]))
        assert (applied.result.refusals, applied.effects) == ((), [])
        assert effect_of(applied.windows[0].effects[0]) == Condemned(0, 0, [3], CondemnReason.HIT, False, 1)
        assert withheld(pool.device) == []
        assert withheld(pool.windows[0].device) == [3]
        assert self.hit(pool) < 6

    def test_a_block_of_kind_0_is_withheld_in_kind_0_alone(self):
        pool = self.pool()
        assert self.hit(pool) == 6
        pool = self.pool()
        pool.apply(Step(3, condemns=[Condemn(0, [3], CondemnReason.HIT)]))
        assert (withheld(pool.device), withheld(pool.windows[0].device)) == ([3], [])
        assert self.hit(pool) < 6

    def test_a_host_block_of_a_window_kind_is_withheld_in_that_tier(self):
        pool = self.pool()
        pool.apply(Step(3, condemns=[Condemn(0, [2], CondemnReason.COPY, host=True, kind=1)]))
        assert [withheld(tier) for tier in (pool.host, pool.windows[0].device, pool.windows[0].host)] == [[], [], [2]]
        assert pool.violations() == []

    def test_a_number_beyond_the_kind_is_refused_and_one_within_it_is_not(self):
        pool = self.pool()
        items = [Condemn(0, [block], CondemnReason.COPY, kind=kind) for block, kind in ((7, 0), (7, 1), (1, 2))]
        applied = pool.apply(Step(3, condemns=items))
        assert [(one.position, one.detail) for one in applied.result.refusals] == [
            (1, "blocks must be between 1 and 6, the device blocks, not 7"),
            (2, "kind must be between 0 and 1, not 2"),
        ]

    def test_a_swapped_group_keeps_the_kinds_apart(self):
        pool = self.pool()
        self.hit(pool)
        table = pool.windows[0].sequences[2].table
        pool.apply(Step(4, condemns=[Condemn(2, table, CondemnReason.SWAP_IN, kind=1)], swap_outs=[2]))
        pool.apply(Step(5, swap_ins=[2]))
        pool.apply(Step(6, frees=[Free(2, FreeReason.FINISHED)]))
        assert pool.violations() == []
        assert withheld(pool.device) == []


class TestManyBlocks:
    MANY = 100_000

    @pytest.mark.parametrize("state", ["free", "cached", "held"])
    def test_100_000_blocks_are_condemned_in_slices(self, state):
        pool = Pool(PoolSpec("engine", 1, "model", 1, self.MANY + 10))
        if state != "free":
            tokens = [*range(self.MANY)]
            pool.apply(Step(1, allocates=[Allocate(1, 1, "r", b"", tokens, self.MANY)]))
            frees = [Free(1, FreeReason.FINISHED)] if state == "cached" else []
            pool.apply(Step(2, commits=[Commit(1, 0, tokens)], frees=frees))
        condemn = Condemn(1, ids(1, self.MANY), CondemnReason.ADOPTION)
        work = pool.applying(Step(3, condemns=[condemn]), budget=1000)
        pauses = 0
        counts = []
        while True:
            try:
                next(work)
            except StopIteration:
                break
            pauses += 1
            counts.append(sum(pool.device.counts))
        assert pauses > 2 * self.MANY // 1024 - 2, "both the check and the change are done in parts"
        assert set(counts) == {self.MANY + 10}
        marks = pool.device.marks
        assert len(marks.withheld_on_release() if state == "held" else marks.withheld()) == self.MANY
        assert pool.violations() == []
        assert pool.apply(Step(4, allocates=[Allocate(2, 2, "r", b"", [1] * 5, 5)])).result.refusals == ()

    def test_no_block_is_searched_for(self, monkeypatch):
        def search(*_):
            raise AssertionError("the free list was searched")

        tier = Tier(1000)
        monkeypatch.setattr(tier.free, "remove", search)
        assert withhold_known(tier, ids(100, 800)) == ids(100, 800)
        assert tier.grant_many(200) == [*ids(1, 99), *ids(900, 101)]
        assert (tier.counts, tier.grant_many(0)) == ((0, 0, 200, 800), [])

    def test_a_step_that_has_condemned_as_many_blocks_as_it_may_change_grants_none(self, monkeypatch, small):
        monkeypatch.setattr(limits, "MAX_STEP_BLOCKS", 3)
        items = {"allocates": [Allocate(1, 1, "r", b"", [1], 1)]}
        applied = small.apply(condemns=[Condemn(0, [1, 2, 3], CondemnReason.COPY)], **items)
        assert [one.reason for one in applied.result.refusals] == [StepRefusal.OUT_OF_BLOCKS]
        small.accept(**items)
