import os
import subprocess
import sys

import pytest

from blocks import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Step,
    StepItem,
    StepRefusal,
    TableChange,
    block_key,
    root_key,
)
from kvmanager import Pool, PoolSpec, Seal, StepOutOfOrder
from tests.kvmanager.tiny_pools import allocate, ids

# Prompts of the acceptance cases E1: 48 tokens that three requests share, then tokens of their own.
SHARED = ids(0, 48)
PROMPT_0 = SHARED + ids(100, 7)
PROMPT_1 = SHARED + ids(200, 5)
PROMPT_2 = SHARED + ids(300, 6)


@pytest.fixture
def pool(new_pool):
    """Ten blocks of sixteen tokens, as in the acceptance cases."""
    return new_pool(10, 16)


@pytest.fixture
def small(new_pool):
    """Eight blocks of two tokens."""
    return new_pool(8, 2)


@pytest.fixture
def two_requests(pool):
    """The state after cases 1 and 2."""
    pool.prefill(1, PROMPT_0)
    pool.prefill(2, PROMPT_1)
    return pool


@pytest.fixture
def both_released(two_requests):
    """The state after case 3."""
    two_requests.free(1)
    two_requests.free(2)
    return two_requests


class TestAllocationHitsAndOrder:
    """Acceptance cases E1."""

    def test_01_a_prompt_gets_blocks_in_order_and_a_commit_keys_the_full_ones(self, pool):
        table = pool.allocate(1, PROMPT_0)
        assert table == TableChange(1, 0, [1, 2, 3, 4], room_tokens=64, cached_tokens=0)
        assert pool.counts([1, 2, 3, 4]) == [1, 1, 1, 1]
        sealed = pool.commit(1, PROMPT_0).sealed
        assert [seal.block for seal in sealed] == [1, 2, 3]
        assert pool.keyed([1, 2, 3, 4]) == [True, True, True, False]

    def test_02_a_second_prompt_shares_the_full_blocks_of_its_prefix(self, pool):
        pool.prefill(1, PROMPT_0)
        table = pool.allocate(2, PROMPT_1)
        assert table == TableChange(2, 0, [1, 2, 3, 5], room_tokens=64, cached_tokens=48)
        assert pool.counts([1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
        assert pool.device.available == 5

    def test_03_released_blocks_without_key_come_first_and_tails_before_heads(self, both_released):
        assert both_released.device.available == 10
        assert both_released.order() == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]

    def test_04_a_hit_takes_blocks_out_of_the_middle_of_the_free_order(self, both_released):
        table = both_released.allocate(3, PROMPT_2)
        assert (table.block_ids, table.cached_tokens) == ([1, 2, 3, 6], 48)
        assert both_released.counts([1, 2, 3]) == [1, 1, 1]
        assert both_released.order() == [7, 8, 9, 10, 4, 5]

    def test_05_a_prompt_as_large_as_the_pool_takes_all_blocks_in_free_order_and_evicts_every_key(self, both_released):
        both_released.allocate(3, PROMPT_2)
        both_released.free(3)
        order = both_released.order()
        assert order == [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]
        assert both_released.allocate(4, ids(1000, 160)).block_ids == order
        assert both_released.device.counts == (0, 0, 10, 0)
        assert both_released.keyed(ids(1, 10)) == [False] * 10
        both_released.free(4)
        assert both_released.allocate(5, PROMPT_0).cached_tokens == 0

    def test_06_one_token_of_a_fully_cached_prompt_is_left_to_compute(self, pool):
        pool.cache(1, SHARED)
        assert pool.allocate(2, SHARED).cached_tokens == 32

    def test_07_equal_prompts_computed_concurrently_keep_their_own_blocks(self, pool):
        pool.allocate(1, PROMPT_0)
        pool.allocate(2, PROMPT_0)
        first, second = pool.commit(1, PROMPT_0).sealed, pool.commit(2, PROMPT_0).sealed
        assert [seal.key for seal in first] == [seal.key for seal in second]
        assert (pool.table(1), pool.table(2)) == ([1, 2, 3, 4], [5, 6, 7, 8])
        assert pool.counts(ids(1, 8)) == [1] * 8

    def test_08_growing_inside_the_last_block_grants_no_block(self, pool):
        pool.prefill(1, PROMPT_0)
        applied = pool.extend(1, {1: 59})
        assert (applied.result.tables, applied.granted_blocks) == ((), 0)
        assert pool.keyed([4]) == [False]

    def test_09_growing_past_the_last_block_grants_one_and_the_former_tail_can_be_keyed(self, pool):
        pool.prefill(1, PROMPT_0)
        applied = pool.extend(1, {1: 78})
        assert applied.result.tables == (TableChange(1, 4, [5], room_tokens=80),)
        pool.commit(1, PROMPT_0 + ids(500, 23))
        assert pool.keyed(pool.table(1)) == [True, True, True, True, False]

    def test_10_requests_join_the_free_order_in_order_of_release(self, pool):
        pool.prefill(1, ids(0, 87))
        pool.prefill(2, ids(400, 48))
        pool.free(1)
        assert pool.order() == [10, 6, 5, 4, 3, 2, 1]
        pool.free(2)
        assert pool.order() == [10, 6, 5, 4, 3, 2, 1, 9, 8, 7]

    def test_11_a_hit_on_the_least_recently_used_blocks_keeps_them(self, pool):
        pool.prefill(1, ids(0, 87))
        pool.prefill(2, ids(400, 48))
        pool.free(1)
        pool.free(2)
        table = pool.allocate(3, ids(0, 32) + ids(700, 3))
        assert (table.block_ids, table.cached_tokens) == ([1, 2, 10], 32)
        assert pool.device.available == 7

    def test_12_a_block_granted_for_a_partial_prompt_is_no_longer_hit(self, new_pool):
        pool = new_pool(1, 16)
        pool.cache(1, ids(0, 16))
        assert pool.allocate(2, ids(50, 15)).block_ids == [1]
        assert pool.keyed([1]) == [False]
        pool.free(2)
        assert pool.order() == [1]
        assert pool.device.counts == (1, 0, 0, 0)
        assert pool.allocate(3, ids(0, 16)).cached_tokens == 0

    def test_13_a_hit_is_never_granted_as_new_in_the_same_allocation(self, new_pool):
        pool = new_pool(2, 16)
        pool.cache(1, ids(0, 16))
        pool.cache(2, ids(50, 16))
        assert pool.order() == [1, 2]
        table = pool.allocate(3, ids(0, 16) + ids(50, 16))
        assert (table.block_ids, table.cached_tokens) == ([1, 2], 16)

    def test_14_without_commits_no_block_is_hit(self, new_pool):
        pool = new_pool(4, 4)
        assert len(pool.allocate(1, ids(0, 10)).block_ids) == 3
        pool.free(1)
        table = pool.allocate(2, ids(0, 16))
        assert (len(table.block_ids), table.cached_tokens) == (4, 0)
        assert pool.refuse(allocates=[allocate(3, ids(0, 4))]) is StepRefusal.OUT_OF_BLOCKS

    def test_15_free_hits_do_not_count_as_space_and_a_refusal_holds_no_block(self, pool):
        prompt = ids(0, 96)
        pool.prefill(1, prompt[:48])
        pool.cache(2, prompt)
        pool.allocate(3, ids(500, 32))
        assert pool.counts(ids(1, 8)) == [1, 1, 1, 0, 0, 0, 1, 1]
        assert pool.device.available == 5
        assert pool.refuse(allocates=[allocate(4, prompt + ids(600, 48))]) is StepRefusal.OUT_OF_BLOCKS
        assert pool.allocate(4, prompt + ids(600, 32)).cached_tokens == 96

    def test_16_each_filled_block_is_keyed_once(self, new_pool):
        pool = new_pool(10, 4)
        pool.allocate(1, ids(0, 10))
        assert len(pool.commit(1, ids(0, 10)).sealed) == 2
        assert len(pool.commit(1, ids(0, 12)).sealed) == 1
        assert pool.keyed(pool.table(1)) == [True, True, True]

    def test_a_prompt_is_refused_unless_all_of_it_fits_even_if_its_first_chunk_would(self, small):
        item = Allocate(1, 1, "r", b"", ids(0, 17), compute_tokens=2)
        assert small.refuse(allocates=[item]) is StepRefusal.OUT_OF_BLOCKS

    @pytest.mark.parametrize(("spare", "reasons"), [(5, []), (6, [StepRefusal.OUT_OF_BLOCKS])])
    def test_spare_blocks_must_be_left_over(self, small, spare, reasons):
        applied = small.apply(allocates=[Allocate(1, 1, "r", b"", ids(0, 5), 5, spare)])
        assert [refusal.reason for refusal in applied.result.refusals] == reasons

    def test_a_long_prompt_gets_blocks_for_its_first_chunk_beyond_the_hits_only(self, small):
        small.cache(1, ids(0, 4))
        table = small.allocate(2, ids(0, 13), compute=3)
        assert (len(table.block_ids), table.room_tokens, table.cached_tokens) == (4, 8, 4)

    def test_a_first_chunk_longer_than_the_prompt_is_cut_to_it(self, small):
        assert small.allocate(1, ids(0, 3), compute=100).room_tokens == 4

    @pytest.mark.parametrize(
        ("length", "hit"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6), (8, 6), (9, 8), (10, 8)]
    )
    def test_a_hit_leaves_at_least_one_token_and_at_most_one_block_to_compute(self, new_pool, length, hit):
        pool = new_pool(16, 2)
        pool.cache(1, ids(0, 10))
        assert pool.allocate(2, ids(0, length)).cached_tokens == hit

    def test_a_hit_ends_at_the_first_block_that_differs_even_if_later_ones_are_equal(self, new_pool):
        pool = new_pool(16, 2)
        pool.cache(1, [1, 2, 3, 4, 5, 6])
        assert pool.allocate(2, [1, 2, 9, 9, 5, 6, 7]).cached_tokens == 2

    def test_a_hit_ends_where_the_middle_of_a_prefix_was_evicted(self, small):
        small.prefill(1, [1, 2, 3, 4, 5, 6])  # blocks 1, 2, 3
        small.fork(1, 2, 2)
        small.free(1, 2)  # order of the cached ones: 3, 2, 1
        small.allocate(3, ids(50, 14))  # the five free ones, then 3 and 2
        assert small.keyed([1, 2, 3]) == [True, False, False]
        small.free(3)
        assert small.allocate(4, [1, 2, 3, 4, 5, 6, 7]).cached_tokens == 2

    def test_the_answer_counts_queried_and_hit_tokens(self, small):
        small.cache(1, ids(0, 4))
        items = [allocate(2, ids(0, 5)), allocate(3, ids(0, 4))]
        applied = small.accept(allocates=items)
        assert (applied.query_tokens, applied.hit_tokens, applied.granted_blocks) == (9, 6, 2)


class TestKeysAndSalts:
    """Acceptance cases E2."""

    def test_20_a_prompt_is_hit_under_its_own_salt_only(self, new_pool):
        for salt, hit in ((b"s1", 48), (b"s2", 0), (b"", 0)):
            pool = new_pool()
            pool.cache(1, PROMPT_0, salt=b"s1")
            assert pool.allocate(2, PROMPT_1, salt=salt).cached_tokens == hit

    def test_20_pools_of_other_models_have_other_keys(self, new_pool):
        keys = []
        for fingerprint in ("model", "another"):
            driver = new_pool(model_fingerprint=fingerprint)
            driver.allocate(1, PROMPT_0)
            keys.append([seal.key for seal in driver.commit(1, PROMPT_0).sealed])
        assert not set(keys[0]) & set(keys[1])

    def test_21_a_salt_changes_every_key_of_the_chain(self, pool):
        keys = []
        for sequence, salt in ((1, b"s1"), (2, b"s2")):
            pool.allocate(sequence, PROMPT_0, salt=salt)
            keys.append([seal.key for seal in pool.commit(sequence, PROMPT_0).sealed])
        assert len(set(keys[0] + keys[1])) == 6

    def test_25_another_first_block_changes_all_later_keys(self, pool):
        pool.cache(1, SHARED)
        other = [999, *SHARED[1:]]
        pool.allocate(2, other)
        pool.commit(2, other)
        assert len({pool.device.key(block) for block in (*pool.table(2), 1, 2, 3)}) == 6

    def test_the_key_of_a_block_is_the_chain_over_its_prefix_however_it_was_committed(self, small):
        tokens = ids(0, 6)
        chain = [root_key("model", b"salt")]
        for start in (0, 2, 4):
            chain.append(block_key(chain[-1], tokens[start : start + 2]))
        small.allocate(1, tokens, salt=b"salt")
        at_once = small.commit(1, tokens[:4]).sealed
        behind_a_commit = small.commit(1, tokens).sealed
        assert [seal.key for seal in at_once + behind_a_commit] == chain[1:]
        small.allocate(2, [0, 1, 9, 9], salt=b"salt")
        behind_a_hit = small.commit(2, [0, 1, 9, 9]).sealed
        assert [seal.key for seal in behind_a_hit] == [block_key(chain[1], [9, 9])]

    def test_24_two_processes_have_the_same_keys_and_grant_the_same_ids(self):
        script = (
            "from blocks import *\nfrom kvmanager import *\n"
            "pool = Pool(PoolSpec('engine', 1, 'model', 2, 8))\n"
            "prompt = [3, 1, 4, 1, 5]\n"
            "steps = [Step(1, allocates=[Allocate(1, 1, 'a', b's', prompt, 5), Allocate(2, 2, 'b', b'', prompt, 5)]),\n"
            "    Step(2, commits=[Commit(1, 0, prompt[:4]), Commit(2, 0, prompt[:4])], forks=[Fork(1, 3, 5)]),\n"
            "    Step(3, frees=[Free(2, FreeReason.FINISHED)], extends=[Extend(1, [(3, 6), (1, 6)])]),\n"
            "    Step(4, allocates=[Allocate(4, 4, 'd', b'', prompt, 5)])]\n"
            "print([pool.apply(step) for step in steps], pool.device.eviction_order())\n"
        )
        outputs = {
            subprocess.run(
                [sys.executable, "-c", script],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert len(outputs) == 1
        assert "sealed_keys=[b" in outputs.pop()

    def test_26_of_two_blocks_with_one_key_the_remaining_one_is_hit_until_evicted(self, new_pool):
        pool = new_pool(4, 2)
        pool.allocate(1, [1, 2, 3])
        pool.allocate(2, [1, 2, 3])
        pool.commit(1, [1, 2])
        pool.commit(2, [1, 2])
        pool.free(1)
        pool.free(2)
        assert pool.order() == [2, 4, 1, 3]
        pool.allocate(3, ids(50, 6))  # evicts 1
        pool.free(3)
        assert pool.order() == [1, 4, 2, 3]
        table = pool.allocate(4, [1, 2, 3], compute=1)
        assert (table.block_ids, table.cached_tokens) == ([3, 1], 2)
        pool.free(4)
        pool.allocate(5, ids(70, 8))  # evicts 3
        pool.free(5)
        assert pool.allocate(6, [1, 2, 3]).cached_tokens == 0


class TestFreeListAndLeaks:
    """Acceptance cases E3 and E8."""

    def test_31_after_all_requests_ended_no_block_is_held(self, pool):
        for round_ in range(4):
            base = 10 * round_
            pool.prefill(base + 1, PROMPT_0)
            pool.fork(base + 1, base + 2, 50)
            pool.extend(base + 1, {base + 1: 60, base + 2: 52})
            pool.prefill(base + 3, ids(1000 * round_, 40))
            pool.allocate(base + 4, PROMPT_2, compute=1)
            reasons = list(FreeReason)
            pool.apply(frees=[Free(base + n, reasons[(n + round_) % len(reasons)]) for n in (3, 1, 4, 2)])
        assert (pool.pool.sequences, pool.pool.groups) == ({}, {})
        assert pool.device.available == 10
        assert pool.device.counts.held == 0
        assert pool.counts(ids(1, 10)) == [0] * 10
        assert (pool.device.shared, pool.device.saved) == (0, 0)

    def test_32_a_preempted_request_hits_its_own_blocks(self, pool):
        pool.prefill(1, PROMPT_0)
        pool.free(1, reason=FreeReason.PREEMPTED)
        assert 1 not in pool.pool.sequences
        table = pool.allocate(1, PROMPT_0)
        assert (table.block_ids[:3], table.cached_tokens) == ([1, 2, 3], 48)
        assert len(set(table.block_ids)) == len(table.block_ids)
        assert pool.counts(table.block_ids) == [1, 1, 1, 1]

    @pytest.mark.parametrize("left", range(4))
    def test_86_an_allocate_that_runs_out_of_blocks_half_way_changes_no_count_or_order(self, small, left):
        small.cache(1, [1, 2, 3, 4])
        small.allocate(2, ids(50, 2 * (6 - left)))
        prompt = [1, 2, 3, 4, *ids(80, 2 * (left + 1))]
        assert small.refuse(allocates=[allocate(3, prompt)]) is StepRefusal.OUT_OF_BLOCKS
        assert small.allocate(4, prompt[:-2]).cached_tokens == (4 if left else 2)

    @pytest.mark.parametrize("left", range(4))
    def test_86_an_extend_that_runs_out_of_blocks_half_way_changes_no_count_or_order(self, small, left):
        small.allocate(1, [1])
        small.fork(1, 2, 1)
        small.allocate(3, ids(50, 2 * (7 - left)))
        rooms = {1: 2 * (left + 1), 2: 2}  # one copy of the tail, then `left` blocks for 1, in any order
        assert small.refuse(extends=[Extend(1, list(rooms.items()))]) is StepRefusal.OUT_OF_BLOCKS


REFUSED = [
    ("commits", Commit(9, 0, [1, 2]), StepRefusal.UNKNOWN),
    ("commits", Commit(1, 2, []), StepRefusal.INVALID),  # no block
    ("commits", Commit(1, 2, [5]), StepRefusal.INVALID),  # no whole block
    ("commits", Commit(1, 2, [5, 6, 7]), StepRefusal.INVALID),
    ("commits", Commit(1, 1, [3, 4]), StepRefusal.INVALID),  # committed before
    ("commits", Commit(1, 0, [1, 2, 3, 4, 5, 6]), StepRefusal.INVALID),
    ("commits", Commit(1, 3, [7, 8]), StepRefusal.INVALID),  # not in order
    ("commits", Commit(1, -1, [1, 2]), StepRefusal.INVALID),
    ("commits", Commit(1, 2, [5, 6, 7, 8]), StepRefusal.INVALID),  # beyond the room
    ("commits", Commit(3, 1, [9, 9]), StepRefusal.INVALID),  # keyed by 4 with other tokens
    ("commits", Commit(3, 1, [7, 9, 9, 9]), StepRefusal.INVALID),
    ("forks", Fork(9, 10, 1), StepRefusal.UNKNOWN),
    ("forks", Fork(1, 1, 1), StepRefusal.ALREADY_EXISTS),
    ("forks", Fork(1, 3, 1), StepRefusal.ALREADY_EXISTS),
    ("forks", Fork(1, 0, 1), StepRefusal.INVALID),
    ("forks", Fork(1, -1, 1), StepRefusal.INVALID),
    ("forks", Fork(1, 10, 0), StepRefusal.INVALID),
    ("forks", Fork(1, 10, -2), StepRefusal.INVALID),
    ("forks", Fork(1, 10, 7), StepRefusal.INVALID),  # beyond the room
    ("frees", Free(9, FreeReason.FINISHED), StepRefusal.UNKNOWN),
    ("extends", Extend(1, [(9, 2)]), StepRefusal.UNKNOWN),
    ("extends", Extend(1, [(1, 8), (9, 2)]), StepRefusal.UNKNOWN),
    ("extends", Extend(1, [(1, 8), (3, 9)]), StepRefusal.INVALID),  # of another group
    ("extends", Extend(7, [(1, 8)]), StepRefusal.INVALID),
    ("extends", Extend(1, [(1, 8), (1, 9)]), StepRefusal.INVALID),  # listed twice
    ("extends", Extend(1, [(1, 12)]), StepRefusal.OUT_OF_BLOCKS),
    ("extends", Extend(1, [(1, 2**31 - 1)]), StepRefusal.OUT_OF_BLOCKS),  # at once, and without a list of 2**30 blocks
    ("extends", Extend(3, [(3, 9), (4, 9)]), StepRefusal.OUT_OF_BLOCKS),
    ("allocates", Allocate(9, 1, "r", b"", [1], 1), StepRefusal.ALREADY_EXISTS),
    ("allocates", Allocate(1, 9, "r", b"", [1], 1), StepRefusal.ALREADY_EXISTS),
    ("allocates", Allocate(9, 0, "r", b"", [1], 1), StepRefusal.INVALID),
    ("allocates", Allocate(9, 9, "r", b"", [], 1), StepRefusal.INVALID),
    ("allocates", Allocate(9, 9, "r", b"", [1], 0), StepRefusal.INVALID),
    ("allocates", Allocate(9, 9, "r", b"", [1], 1, -1), StepRefusal.INVALID),
    ("allocates", Allocate(9, 9, "r", b"", [1, 2, 3, 4, *ids(50, 5)], 1), StepRefusal.OUT_OF_BLOCKS),
    ("lengths", Length(9, 1), StepRefusal.UNKNOWN),
    ("lengths", Length(1, -1), StepRefusal.INVALID),
    ("lengths", Length(1, 7), StepRefusal.INVALID),  # beyond the room
]


class TestRefusals:
    @pytest.fixture
    def busy(self, small):
        """Held, shared, cached and free blocks: two of eight can be granted."""
        small.prefill(1, [1, 2, 3, 4, 5])  # blocks 1, 2, 3: two of them committed
        small.allocate(3, [1, 2, *ids(60, 4)])  # block 1 is a hit, 4 and 5
        small.fork(3, 4, 6)
        small.commit(4, [1, 2, 9, 8])  # 3 has not committed block 4 yet
        small.cache(5, [40, 41])  # block 6
        small.allocate(6, [7])  # block 7; 8 was never used
        assert small.device.counts == (1, 1, 6, 0)
        return small

    @pytest.mark.parametrize(("items", "item", "reason"), REFUSED)
    def test_a_refused_item_changes_nothing(self, busy, items, item, reason):
        assert busy.refuse(**{items: [item]}) is reason

    def test_every_refusal_names_its_list_and_position_and_the_other_items_are_applied(self, small):
        small.allocate(1, [1, 2, 3])
        applied = small.apply(
            commits=[Commit(1, 0, [1, 2]), Commit(1, 0, [1, 2])],
            forks=[Fork(8, 9, 1), Fork(1, 2, 3)],
            frees=[Free(2, FreeReason.PRUNED), Free(2, FreeReason.PRUNED)],
            extends=[Extend(1, [(1, 100)]), Extend(1, [(1, 4)])],
            allocates=[Allocate(1, 7, "r", b"", [1], 1), allocate(3, [1])],
            lengths=[Length(7, 1), Length(3, 1), Length(3, 3)],
        )
        assert [(refusal.item, refusal.position, refusal.reason) for refusal in applied.result.refusals] == [
            (StepItem.COMMIT, 1, StepRefusal.INVALID),
            (StepItem.FORK, 0, StepRefusal.UNKNOWN),
            (StepItem.FREE, 1, StepRefusal.UNKNOWN),
            (StepItem.EXTEND, 0, StepRefusal.OUT_OF_BLOCKS),
            (StepItem.ALLOCATE, 0, StepRefusal.ALREADY_EXISTS),
            (StepItem.LENGTH, 0, StepRefusal.UNKNOWN),
            (StepItem.LENGTH, 2, StepRefusal.INVALID),
        ]
        assert [table.sequence for table in applied.result.tables] == [1, 2, 1, 3]
        assert sorted(small.pool.sequences) == [1, 3]
        assert small.pool.sequences[3].computed_tokens == 1

    def test_a_refusal_for_lack_of_blocks_names_both_counts(self, small):
        small.allocate(1, ids(0, 10))
        applied = small.apply(extends=[Extend(1, [(1, 18)])], allocates=[Allocate(2, 2, "r", b"", ids(50, 8), 1)])
        for refusal in applied.result.refusals:
            assert "4" in refusal.detail
            assert "3" in refusal.detail


class TestExtend:
    def test_a_repeated_extend_grants_once(self, small):
        small.allocate(1, [1])
        first = small.extend(1, {1: 5})
        assert first.result.tables == (TableChange(1, 1, [2, 3], room_tokens=6),)
        before = small.state()
        second = small.extend(1, {1: 5})
        assert (second.result.tables, second.result.copies, second.granted_blocks) == ((), (), 0)
        assert small.state() == before

    @pytest.mark.parametrize("tokens", [5, 4, 1, 0])
    def test_an_extend_below_the_room_is_accepted_and_changes_nothing(self, small, tokens):
        small.allocate(1, [1, 2, 3, 4, 5, 6])
        before = small.state()
        small.extend(1, {1: tokens})
        assert small.state() == before

    def test_an_extend_below_the_room_copies_no_shared_tail_in_a_full_pool(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        small.allocate(3, ids(50, 12))
        assert small.device.available == 0
        before = small.state()
        assert small.extend(1, {1: 3, 2: 2}).result.copies == ()
        assert small.state() == before

    def test_a_shared_tail_is_copied_by_the_first_writer_and_kept_by_the_last_holder(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        first = small.extend(1, {2: 4})
        assert first.result.copies == ((2, 3),)
        assert first.result.tables == (TableChange(2, 1, [3], room_tokens=4),)
        last = small.extend(1, {1: 4})
        assert (last.result.copies, last.granted_blocks) == ((), 0)
        assert last.result.tables == (TableChange(1, 1, [2], room_tokens=4),)

    def test_a_group_of_two_sharing_a_tail_needs_one_block(self, small):
        small.allocate(1, [1])
        small.fork(1, 2, 1)
        small.allocate(3, ids(50, 12))
        assert small.device.available == 1
        applied = small.extend(1, {1: 2, 2: 2})
        assert applied.result.copies == ((1, 8),)
        assert (small.table(1), small.table(2)) == ([8], [1])

    def test_a_group_of_three_sharing_a_tail_needs_two_blocks(self, small):
        small.allocate(1, [1])
        small.fork(1, 2, 1)
        small.fork(1, 3, 1)
        small.allocate(4, ids(50, 12))
        assert small.refuse(extends=[Extend(1, [(1, 2), (2, 2), (3, 2)])]) is StepRefusal.OUT_OF_BLOCKS
        small.free(4)
        assert len(small.extend(1, {1: 2, 2: 2, 3: 2}).result.copies) == 2

    def test_a_tail_shared_with_a_sequence_that_does_not_grow_is_copied_by_all_writers(self, small):
        small.allocate(1, [1])
        small.fork(1, 2, 1)
        small.fork(1, 3, 1)
        assert len(small.extend(1, {1: 2, 2: 2}).result.copies) == 2
        assert small.table(3) == [1]
        assert small.counts([1]) == [1]

    def test_a_write_to_a_keyed_block_copies_it_even_for_its_last_holder(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 3)
        small.free(2)
        assert small.counts([1, 2]) == [1, 1]
        applied = small.extend(1, {1: 4})
        assert applied.result.copies == ((2, 3),)
        assert small.keyed([2, 3]) == [True, False]
        assert small.device.counts == (5, 1, 2, 0)
        assert small.allocate(3, [1, 2, 3, 4, 5]).cached_tokens == 4

    def test_the_copied_block_may_lie_before_the_last_one(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 1)
        applied = small.extend(1, {2: 5})
        assert applied.result.copies == ((1, 3),)
        assert applied.result.tables == (TableChange(2, 0, [3, 4, 5], room_tokens=6),)
        assert small.table(1) == [1]

    def test_blocks_below_the_old_room_are_never_replaced(self, small):
        small.prefill(1, [1, 2, 3, 4])
        small.fork(1, 2, 4)
        applied = small.extend(1, {1: 6, 2: 6})
        assert applied.result.copies == ()
        assert (small.table(1), small.table(2)) == ([1, 2, 3], [1, 2, 4])

    def test_no_copy_overwrites_the_source_of_another_copy_of_the_step(self, small):
        # 1 is the last holder of its keyed tail: the copy's source has no holder left but must not be granted.
        small.prefill(1, [1, 2])
        small.fork(1, 2, 1)
        small.free(2)
        small.allocate(3, ids(50, 12))
        assert small.device.available == 1
        applied = small.apply(extends=[Extend(1, [(1, 2)]), Extend(3, [(3, 13)])], allocates=[allocate(4, [9])])
        assert applied.result.copies == ((1, 8),)
        assert [refusal.item for refusal in applied.result.refusals] == [StepItem.EXTEND, StepItem.ALLOCATE]
        assert small.order() == [1]
        assert small.extend(3, {3: 13}).result.tables[0].block_ids == [1]

    def test_the_source_of_a_copy_can_still_be_hit_in_the_same_step(self, small):
        small.prefill(1, [1, 2])
        small.fork(1, 2, 1)
        small.free(2)
        applied = small.accept(extends=[Extend(1, [(1, 2)])], allocates=[allocate(4, [1, 2, 3])])
        assert applied.result.copies == ((1, 2),)
        assert applied.result.tables[-1].block_ids == [1, 3]
        assert small.counts([1]) == [1]

    def test_the_answer_has_the_counts_after_the_step(self, small):
        small.prefill(1, [1, 2, 3])
        applied = small.accept(frees=[Free(1, FreeReason.FINISHED)], allocates=[allocate(2, [9])])
        assert applied.device == small.device.counts == (6, 1, 1, 0)


class TestFork:
    @pytest.fixture
    def parent(self, small):
        """A sequence of five tokens, two blocks committed, in blocks 1, 2, 3 with room for six."""
        small.prefill(1, [1, 2, 3, 4, 5])
        return small

    @pytest.mark.parametrize(
        ("length", "table", "committed"),
        [
            (1, [1], 0),
            (2, [1], 1),
            (3, [1, 2], 1),
            (4, [1, 2], 2),
            (5, [1, 2, 3], 2),
            (6, [1, 2, 3], 2),
        ],
    )
    def test_both_have_the_blocks_below_the_length_and_room_for_it(self, parent, length, table, committed):
        applied = parent.fork(1, 2, length)
        assert applied.result.tables == (TableChange(1, len(table), [], length), TableChange(2, 0, table, length))
        assert (parent.table(1), parent.table(2)) == (table, table)
        assert (parent.room(1), parent.room(2)) == (length, length)
        assert parent.counts(table) == [2] * len(table)
        assert parent.device.counts.held == len(table)
        for sequence in (1, 2):
            assert parent.pool.sequences[sequence].committed_blocks == committed

    def test_blocks_cut_from_the_parent_are_released_tail_first(self, parent):
        parent.commit(1, [1, 2, 3, 4, 5, 6])
        parent.fork(1, 2, 1)
        assert parent.order() == [4, 5, 6, 7, 8, 3, 2]

    def test_a_fork_grants_no_block(self, parent):
        parent.allocate(3, ids(50, 10))
        assert parent.device.available == 0
        assert parent.fork(1, 2, 5).granted_blocks == 0

    def test_a_child_has_the_group_and_the_keys_of_its_parent(self, small):
        small.prefill(1, [1, 2, 3], salt=b"s", group=7)
        small.fork(1, 2, 3)
        small.extend(7, {1: 4, 2: 4})
        assert small.commit(2, [1, 2, 3, 9]).sealed[0].key == block_key(
            block_key(root_key("model", b"s"), [1, 2]), [3, 9]
        )
        small.free(1)
        assert small.pool.groups == {7: {2: None}}

    def test_a_child_of_a_parent_without_keys_starts_its_chain_with_the_parents_salt(self, small):
        small.allocate(1, [1, 2], salt=b"s")
        small.fork(1, 2, 2)
        assert small.commit(2, [1, 2]).sealed[0].key == block_key(root_key("model", b"s"), [1, 2])

    def test_a_block_cut_by_a_fork_cannot_be_committed_as_full(self, small):
        small.allocate(1, [1, 2])
        small.fork(1, 2, 1)
        for sequence in (1, 2):
            assert small.refuse(commits=[Commit(sequence, 0, [1, 2])]) is StepRefusal.INVALID

    def test_after_a_fork_inside_a_committed_block_each_commits_its_own(self, parent):
        parent.fork(1, 2, 3)
        parent.extend(1, {1: 4, 2: 4})
        parent.commit(1, [1, 2, 3, 7])
        parent.commit(2, [1, 2, 3, 8])
        parent.free(1, 2)
        for last, hit in ((7, 4), (8, 4), (4, 4), (6, 2)):
            parent.allocate(5, [1, 2, 3, last, 0])
            assert parent.pool.sequences[5].committed_blocks * 2 == hit
            parent.free(5)

    def test_a_block_shared_by_a_fork_may_be_committed_through_both(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        assert len(small.commit(2, [1, 2]).sealed) == 1
        assert small.commit(1, [1, 2]).sealed == []
        assert [small.pool.sequences[sequence].committed_blocks for sequence in (1, 2)] == [1, 1]

    def test_a_commit_through_the_second_of_two_seals_only_what_is_new(self, small):
        small.allocate(1, [1, 2, 3])
        small.fork(1, 2, 3)
        small.commit(2, [1, 2])
        small.extend(1, {1: 4, 2: 4})
        assert [seal.block for seal in small.commit(1, [1, 2, 3, 4]).sealed] == [small.table(1)[1]]

    def test_a_fork_of_a_fork_of_a_fork_shares_one_block(self, small):
        small.allocate(1, [1, 2])
        small.accept(forks=[Fork(1, 2, 2), Fork(2, 3, 2), Fork(3, 4, 2)])
        assert small.counts([1]) == [4]
        assert (small.device.shared, small.device.saved) == (1, 3)

    def test_fork_the_parent_and_free_it_in_one_step(self, parent):
        parent.accept(forks=[Fork(1, 2, 5)], frees=[Free(1, FreeReason.PRUNED)])
        assert parent.table(2) == [1, 2, 3]
        assert parent.counts([1, 2, 3]) == [1, 1, 1]


class TestCommit:
    def test_a_commit_is_hit_by_an_allocate_of_the_same_step(self, small):
        small.allocate(1, [1, 2, 3])
        applied = small.accept(commits=[Commit(1, 0, [1, 2])], allocates=[allocate(2, [1, 2, 9])])
        assert applied.hit_tokens == 2

    def test_the_answer_lists_what_was_sealed_with_its_keys(self, small):
        small.allocate(1, [1, 2, 3, 4])
        first = block_key(root_key("model", b""), [1, 2])
        assert small.commit(1, [1, 2, 3, 4]).sealed == [Seal(1, first), Seal(2, block_key(first, [3, 4]))]

    def test_a_hit_counts_as_committed(self, small):
        small.cache(1, [1, 2, 3, 4])
        small.allocate(2, [1, 2, 3, 4, 5, 6])
        small.accept(commits=[Commit(2, 2, [5, 6])])
        small.free(2)
        assert small.allocate(3, [1, 2, 3, 4, 5, 6, 7]).cached_tokens == 6

    def test_blocks_with_equal_contents_continue_one_chain_of_keys(self, small):
        small.allocate(1, [1, 2, 3, 4])
        small.allocate(2, [1, 2, 3, 4])
        small.commit(1, [1, 2])
        small.commit(2, [1, 2, 3, 4])
        assert small.device.keys.find(small.device.key(1)) == 1
        small.free(1, 2)
        assert small.allocate(3, [1, 2, 3, 4, 5]).block_ids[:2] == [1, 4]

    def test_an_uncommitted_block_becomes_free_without_a_key(self, small):
        small.allocate(1, [1, 2, 3, 4])
        small.commit(1, [1, 2])
        small.free(1)
        assert small.device.counts == (7, 1, 0, 0)


class TestSteps:
    @pytest.mark.parametrize("number", [-1, 0, 1, 4, 5])
    def test_a_step_number_that_is_not_the_highest_is_refused_and_changes_nothing(self, small, state_of, number):
        small.pool.apply(Step(5, allocates=[allocate(1, [1])]))
        before = state_of(small.pool)
        with pytest.raises(StepOutOfOrder):
            small.pool.apply(Step(number, frees=[Free(1, FreeReason.FINISHED)]))
        assert state_of(small.pool) == before

    def test_items_are_applied_in_the_order_of_the_lists(self, new_pool):
        # Each item needs the effect of the one before it, so that no other order is accepted.
        pool = new_pool(3, 2)
        pool.allocate(1, [1, 2, 3, 4, 5])
        applied = pool.accept(
            commits=[Commit(1, 0, [1, 2, 3, 4])],
            forks=[Fork(1, 2, 4)],
            frees=[Free(1, FreeReason.PRUNED)],
            extends=[Extend(1, [(2, 5)])],
            lengths=[Length(2, 5)],
        )
        assert applied.device == (0, 0, 3, 0)
        assert pool.table(2) == [1, 2, 3]

    def test_an_empty_step_changes_nothing(self, small):
        small.prefill(1, [1, 2, 3])
        before = small.state()
        applied = small.accept()
        assert small.state() == before
        assert (applied.sealed, applied.result.tables, applied.result.copies, applied.granted_blocks) == ([], (), (), 0)


class TestFillCounts:
    def test_tokens_of_shared_blocks_count_once(self, small):
        small.allocate(1, [1, 2, 3])
        small.accept(lengths=[Length(1, 3)])
        assert small.pool.computed_tokens() == 3
        small.fork(1, 2, 3)
        assert small.pool.computed_tokens() == 3
        small.extend(1, {1: 4, 2: 4})
        small.accept(lengths=[Length(1, 4)])
        assert small.pool.computed_tokens() == 2 + 2 + 1

    def test_hits_are_computed_and_new_blocks_are_not(self, small):
        small.cache(1, [1, 2, 3, 4])
        assert small.pool.computed_tokens() == 0
        small.allocate(2, [1, 2, 3, 4, 5])
        assert small.pool.computed_tokens() == 4

    def test_a_fork_below_the_computed_tokens_drops_the_rest(self, small):
        small.allocate(1, [1, 2, 3])
        small.accept(lengths=[Length(1, 3)], forks=[Fork(1, 2, 3)])
        small.fork(1, 3, 1)
        assert [small.pool.sequences[sequence].computed_tokens for sequence in (1, 2, 3)] == [1, 0, 1]


def test_room_beyond_the_wires_integer_range_is_refused():
    pool = Pool(PoolSpec("engine", 1, "model", 65536, 1 << 16))
    pool.apply(Step(1, allocates=[allocate(1, [1])]))
    applied = pool.apply(Step(2, extends=[Extend(1, [(1, 2**31 - 1)])]))
    assert [one.reason for one in applied.result.refusals] == [StepRefusal.INVALID]
    assert applied.result.refusals[0].detail == f"tokens must be at most {2**31 - 65536}, not {2**31 - 1}"
    assert pool.violations() == []
    most = pool.apply(Step(3, extends=[Extend(1, [(1, 2**31 - 65536)])]))
    assert (most.result.refusals, most.result.tables[0].room_tokens) == ((), 2**31 - 65536)
