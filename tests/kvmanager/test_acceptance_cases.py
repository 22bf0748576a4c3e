"""Cases of docs/kv-acceptance.md that no other test of the core covers, and a check of that page itself.

The numbers are those of Quire's rules: ids from 1, and block 0 has no holder.
"""

import re
from pathlib import Path

import pytest

from blocks import Allocate, Commit, Extend, Free, FreeReason, Reset, Step, StepItem, StepRefusal, block_key, root_key
from kvmanager import Event, KVManager, PoolSpec, SessionReplaced, StepOutOfOrder, adopt, report_of
from tests.kvmanager.tiny_pools import ids

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kv-acceptance.md"


def allocate(sequence, tokens, compute=None, spare=0):
    return Allocate(sequence, sequence, f"r{sequence}", b"", tokens, compute or len(tokens), spare)


class Engine:
    """An engine's end of a manager: numbers the Steps and reads their events."""

    def __init__(self, blocks=10, block_size=2, incarnation=1):
        self.manager = KVManager(epoch=1)
        self.spec = PoolSpec("engine", incarnation, "model", block_size, blocks)
        self.session = self.manager.attach(self.spec)
        self.number = 0
        self.next_event = 1

    @property
    def pool(self):
        return self.session.pool

    def attach(self, report):
        self.session = self.manager.attach(self.spec, adopted(self.spec, report))
        assert self.pool.violations() == []

    def apply(self, **items):
        self.number += 1
        applied = self.manager.apply(self.session, Step(self.number, **items))
        assert self.pool.violations() == []
        return applied

    def accept(self, **items):
        applied = self.apply(**items)
        assert applied.result.refusals == ()
        return applied

    def commit(self, sequence, tokens):
        return self.accept(commits=[Commit(sequence, 0, tokens)])

    def cache(self, sequence, tokens):
        self.accept(allocates=[allocate(sequence, tokens)])
        self.commit(sequence, tokens)
        self.accept(frees=[Free(sequence, FreeReason.FINISHED)])

    def events(self):
        page = self.manager.ledger.events(self.next_event, 10**9)
        found = list(page.events)
        self.next_event += len(found)
        return found


def adopted(spec, report):
    adoption = adopt(spec, report)
    while True:
        try:
            next(adoption)
        except StopIteration as end:
            return end.value


# Reset and grants


def test_29_a_reset_of_idle_blocks_forgets_every_key_and_is_the_last_event():
    engine = Engine()
    engine.cache(1, ids(0, 8))
    engine.accept(pins=[Reset()])
    assert engine.pool.device.counts == (10, 0, 0, 0)
    assert list(engine.pool.device.keys.entries()) == []
    last = engine.events()[-1]
    assert (last.item, last.ranges, last.refusal) == (StepItem.PIN, (), None)
    assert engine.accept(allocates=[allocate(2, ids(0, 8))]).hit_tokens == 0


def test_30_all_requests_may_be_preempted_in_the_step_that_resets_and_restart_without_hits(new_pool):
    # No preemption is needed: a reset only removes the blocks of running sequences from the index.
    pool = new_pool(10, 2)
    for sequence in (1, 2):
        pool.prefill(sequence, ids(0, 5))
    pool.accept(pins=[Reset()], frees=[Free(sequence, FreeReason.PREEMPTED) for sequence in (1, 2)])
    assert pool.pool.sequences == {}
    assert pool.device.counts == (10, 0, 0, 0)
    assert pool.allocate(1, ids(0, 5)).cached_tokens == 0


def test_34_every_granted_block_and_every_eviction_is_recorded_once(new_pool):
    pool = new_pool(6, 2)
    pool.cache(9, ids(50, 8))
    granted, evicted = [], []
    prompt = ids(0, 12)
    for items in (
        {"allocates": [allocate(1, prompt, compute=3)]},
        {"extends": [Extend(1, [(1, 7)])]},
        {"extends": [Extend(1, [(1, 7)])]},
        {},
        {"extends": [Extend(1, [(1, 12)])]},
    ):
        applied = pool.accept(**items)
        new = [block for table in applied.result.tables for block in table.block_ids]
        assert applied.granted_blocks == len(new)
        granted += new
        evicted += applied.evicted
    assert granted == pool.table(1) == [5, 6, 4, 3, 2, 1]
    assert [block for block, _ in evicted] == [4, 3, 2, 1]


# Events


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_35_blocks_committed_at_once_are_one_event_and_the_answer_has_their_keys(blocks):
    engine = Engine()
    tokens = ids(0, 2 * blocks)
    engine.accept(allocates=[allocate(1, tokens)])
    engine.events()
    sealed = engine.commit(1, tokens).sealed
    # Events have no token ids or keys, because these would reveal prompts to readers.
    assert engine.events() == [Event(3, "engine", 2, StepItem.COMMIT, 1, 1, "r1", ranges=((1, blocks),))]
    assert engine.events() == []
    parent = root_key("model", b"")
    for index, seal in enumerate(sealed):
        parent = block_key(parent, tokens[2 * index : 2 * index + 2])
        assert seal == (index + 1, parent)
    assert len(sealed) == blocks


@pytest.mark.parametrize("blocks", [2, 3, 10])
def test_36_a_prompt_that_evicts_a_cached_one_records_each_eviction_then_its_commit(blocks):
    engine = Engine(blocks=blocks)
    engine.cache(1, ids(0, 2 * blocks))
    engine.events()
    tokens = ids(100, 2 * blocks)
    engine.accept(allocates=[allocate(2, tokens)])
    engine.commit(2, tokens)
    begun, committed = engine.events()
    assert (begun.item, begun.evicted) == (StepItem.ALLOCATE, tuple(range(blocks, 0, -1)))
    assert (committed.item, committed.evicted) == (StepItem.COMMIT, ())


def test_37_a_reused_prefix_is_not_recorded_as_committed_again_nor_is_an_item_without_effect():
    engine = Engine()
    engine.cache(1, ids(0, 8))
    engine.events()
    applied = engine.accept(allocates=[allocate(2, ids(0, 9))])
    assert (applied.hit_tokens, applied.sealed) == (8, [])
    engine.accept(extends=[Extend(2, [(2, 9)])], lengths=[(2, 8)])
    engine.accept()
    (begun,) = engine.events()
    assert (begun.item, begun.cached_tokens, begun.evicted) == (StepItem.ALLOCATE, 8, ())
    assert len(list(engine.pool.device.keys.entries())) == 4


# Allocation and counting


def test_64_of_two_prompts_with_host_hits_one_is_allocated_and_the_other_refused(new_pool):
    pool = new_pool(9, 4, host_blocks=4)
    prompts = ids(0, 20), ids(100, 20)  # five blocks each, of which two are in the host tier
    for sequence, prompt in enumerate(prompts, 1):
        pool.cache(sequence, prompt[:8])
    pool.cache(3, ids(200, 36))  # demotes the four blocks of both
    assert pool.host.counts == (0, 4, 0, 0)
    begun = pool.allocate(4, prompts[0])
    assert (len(begun.block_ids), begun.cached_tokens) == (5, 8)
    assert pool.refuse(allocates=[allocate(5, prompts[1])]) is StepRefusal.OUT_OF_BLOCKS
    pool.free(4)
    begun = pool.allocate(5, prompts[1])
    assert (len(begun.block_ids), begun.cached_tokens) == (5, 8)
    pool.free(5)
    assert pool.device.available == 9


def test_68_the_counters_give_the_hit_rate_of_any_window_and_an_empty_step_changes_none():
    # A rate is the difference between two reads of the counters.
    engine = Engine(blocks=60)
    engine.cache(1, ids(0, 8))
    looks = [(0, 0)]
    for sequence, prompts in enumerate(([ids(0, 9)], [ids(0, 5), ids(50, 3)], [], [ids(0, 9), ids(0, 8)]), 1):
        before = engine.session.totals.prefix_hit_tokens, engine.session.totals.prefix_query_tokens
        items = [allocate(10 * sequence + place, prompt) for place, prompt in enumerate(prompts)]
        engine.accept(allocates=items)
        after = engine.session.totals.prefix_hit_tokens, engine.session.totals.prefix_query_tokens
        looks.append((after[0] - before[0], after[1] - before[1]))
    assert looks[1:] == [(8, 9), (4, 8), (0, 0), (14, 17)]


# Steps, sessions and reports


def test_69_a_grant_whose_answer_was_lost_is_undone_by_the_report_and_made_once():
    engine = Engine()
    engine.cache(1, ids(0, 4))
    known = report_of(engine.pool)
    engine.accept(allocates=[allocate(2, ids(0, 5))])  # its answer is lost
    engine.attach(known)
    assert engine.pool.device.counts == (8, 2, 0, 0)
    applied = engine.accept(allocates=[allocate(2, ids(0, 5))])
    assert (applied.hit_tokens, applied.granted_blocks) == (4, 1)
    assert [engine.pool.device.ref_count(block) for block in applied.result.tables[0].block_ids] == [1, 1, 1]
    assert list(engine.pool.sequences) == [2]


def test_71_a_repeated_step_number_is_refused(state_of):
    engine = Engine()
    engine.accept(allocates=[allocate(1, ids(0, 5))])
    before = state_of(engine.session)
    for other in (allocate(1, ids(0, 5)), allocate(1, ids(0, 7)), allocate(2, ids(0, 5))):
        with pytest.raises(StepOutOfOrder):
            engine.manager.apply(engine.session, Step(1, allocates=[other]))
    assert state_of(engine.session) == before


def test_72_frees_and_commits_of_an_older_incarnation_do_nothing(state_of):
    engine = Engine()
    engine.accept(allocates=[allocate(1, ids(0, 4))])
    newer = engine.manager.attach(PoolSpec("engine", 2, "model", 2, 10))
    engine.manager.apply(newer, Step(1, allocates=[allocate(1, ids(0, 4))]))
    before = state_of(newer)
    for items in ({"commits": [Commit(1, 0, ids(0, 4))]}, {"frees": [Free(1, FreeReason.FINISHED)]}):
        with pytest.raises(SessionReplaced):
            engine.manager.apply(engine.session, Step(2, **items))
    assert state_of(newer) == before


def test_73_a_number_from_before_the_report_is_refused_after_a_new_attach_too():
    engine = Engine()
    for number in (1, 2, 3):
        engine.accept(allocates=[allocate(number, ids(0, 2))])
    engine.attach(report_of(engine.pool))
    for number in (1, 3):
        with pytest.raises(StepOutOfOrder):
            engine.manager.apply(engine.session, Step(number, frees=[Free(1, FreeReason.FINISHED)]))
    assert sorted(engine.pool.sequences) == [1, 2, 3]


def test_75_an_engine_stalled_until_its_pool_was_dropped_is_refused_and_reports_its_blocks_again():
    engine = Engine()
    engine.accept(allocates=[allocate(1, ids(0, 5))])
    known = report_of(engine.pool)
    engine.manager.detach(engine.session)
    # Another engine's pool is other memory: equal ids are different blocks.
    other = engine.manager.attach(PoolSpec("other", 1, "model", 2, 10))
    engine.manager.apply(other, Step(1, allocates=[allocate(1, ids(0, 5))]))
    with pytest.raises(SessionReplaced):
        engine.accept(extends=[Extend(1, [(1, 7)])])
    engine.attach(known)
    assert engine.pool.sequences[1].table == [1, 2, 3]
    (table,) = engine.accept(extends=[Extend(1, [(1, 7)])]).result.tables
    assert table.block_ids == [4]


def test_80_a_restarted_manager_grants_no_block_that_a_reporting_engine_holds():
    engine = Engine(blocks=4)
    engine.cache(1, ids(0, 2))
    engine.accept(allocates=[allocate(2, ids(50, 4))])
    report, number = report_of(engine.pool), engine.number
    again = Engine(blocks=4)
    again.attach(report)
    again.number = number
    assert again.pool.device.counts == engine.pool.device.counts == (1, 1, 2, 0)
    assert again.accept(allocates=[allocate(3, ids(70, 4))]).result.tables[0].block_ids == [4, 1]


def test_81_the_report_replaces_the_managers_pool():
    engine, truth = Engine(blocks=6), Engine(blocks=6)
    for one in (engine, truth):
        one.accept(allocates=[allocate(1, ids(0, 4)), allocate(2, ids(50, 2))])
    truth.accept(frees=[Free(1, FreeReason.CANCELLED)], allocates=[allocate(3, ids(70, 4))])
    # In the manager's pool 1 and 2 are held and 4 and 5 free; in the engine's, the reverse.
    assert truth.pool.sequences[3].table == [4, 5]
    engine.attach(report_of(truth.pool))
    engine.number = truth.number
    assert {number: one.table for number, one in engine.pool.sequences.items()} == {2: [3], 3: [4, 5]}
    assert engine.pool.device.eviction_order() == [6, 2, 1]
    assert engine.accept(allocates=[allocate(4, ids(0, 6))]).result.tables[0].block_ids == [6, 2, 1]
    assert engine.apply(allocates=[allocate(5, [1])]).result.refusals[0].reason is StepRefusal.OUT_OF_BLOCKS


# The page


def rows():
    """The cases of the page: number, sentence, and tests or the reason for having none."""
    lines = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| *\d", line)]
    return [(int(number), sentence, covered) for number, sentence, covered in lines]


def named_tests():
    return [(number, *name) for number, _, text in rows() for name in re.findall(r"([\w/]+\.py)::(\w+)", text)]


def test_the_page_lists_every_case_with_tests_or_the_reason_why_there_are_none():
    assert [number for number, _, _ in rows()] == list(range(1, 91))
    assert all(sentence.strip() and covered.strip() for _, sentence, covered in rows())


def test_every_test_that_the_page_names_exists():
    missing = [
        f"{file}::{name}"
        for _, file, name in named_tests()
        if not re.search(rf"^ *(async def|def|class) {name}\b|^{name} =", (ROOT / "tests" / file).read_text(), re.M)
    ]
    assert missing == []


def test_every_test_named_after_a_case_is_in_its_row():
    tests = ROOT / "tests"
    found = {
        (int(number), str(file.relative_to(tests)), name)
        for file in [tests / "kvmanager" / "test_pool.py", *tests.rglob("test_acceptance_cases.py")]
        for name, number in re.findall(r"^ *def (test_(\d\d)_\w+)", file.read_text(), re.M)
    }
    assert found - set(named_tests()) == set()
