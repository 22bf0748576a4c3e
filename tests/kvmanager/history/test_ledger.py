"""The ledger: numbered events of all verbs, read in pages."""

import gc
import tracemalloc
from array import array
from enum import Enum
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    Reset,
    Step,
    StepItem,
    StepRefusal,
    Unpin,
)
from kvmanager import Event, KVManager, Ledger, PoolChange, PoolSpec, adopt, report_of
from kvmanager.history.events import Entry, block_ranges
from tests.kvmanager.tiny_pools import end_of

SIZE = 4
# No block, sequence, group, step or event of these tests has these numbers.
TOKENS = st.integers(1_900_000_000, 1_900_000_999)


class Engine:
    def __init__(self, manager=None, name="engine", blocks=8, host_blocks=0):
        self.manager = manager or KVManager(epoch=1)
        self.ledger = self.manager.ledger
        self.spec = PoolSpec(name, 1, "model", SIZE, blocks, host_blocks)
        self.session = self.manager.attach(self.spec)
        self.number = 0

    def step(self, **items):
        self.number += 1
        return self.manager.apply(self.session, Step(self.number, **items))

    def allocate(self, sequence, tokens, **fields):
        item = Allocate(sequence, sequence, f"r{sequence}", b"", tokens, len(tokens), **fields)
        return self.step(allocates=[item])

    def commit(self, sequence, tokens):
        first = self.session.pool.sequences[sequence].committed_blocks
        whole = tokens[first * SIZE : len(tokens) // SIZE * SIZE]
        return self.step(commits=[Commit(sequence, first, whole)])

    def extend(self, sequence, tokens):
        return self.step(extends=[Extend(sequence, [(sequence, tokens)])])

    def free(self, *sequences, reason=FreeReason.FINISHED, served=0):
        return self.step(frees=[Free(sequence, reason, served) for sequence in sequences])

    def cache(self, sequence, tokens):
        self.allocate(sequence, tokens)
        self.commit(sequence, tokens)
        self.free(sequence)


def prompt(start, length):
    return list(range(start, start + length))


def kept(ledger, from_number=0):
    return list(ledger.events(from_number, 10**9).events)


def verb_events(engine):
    return [event for event in kept(engine.ledger) if event.change is None]


def blocks_in(ranges):
    return [block for first, last in ranges for block in range(first, last + 1)]


@pytest.fixture
def engine():
    return Engine()


# Recording


def test_attaching_and_detaching_are_events(engine):
    engine.manager.detach(engine.session)
    assert kept(engine.ledger) == [
        Event(1, "engine", change=PoolChange.ATTACHED),
        Event(2, "engine", change=PoolChange.DETACHED),
    ]


def test_every_applied_verb_is_an_event_with_its_blocks(engine):
    tokens = prompt(0, 10)
    engine.allocate(1, tokens, waited_seconds=0.5)
    engine.commit(1, tokens)
    engine.step(forks=[Fork(1, 2, 10)])
    engine.extend(1, 14)
    engine.free(2, reason=FreeReason.PRUNED)
    engine.free(1)
    allocate, commit, fork, extend, pruned, free = verb_events(engine)
    assert allocate == Event(
        2, "engine", 1, StepItem.ALLOCATE, 1, 1, "r1", ranges=((1, 3),), waited_seconds=0.5, cached_tokens=0
    )
    assert commit == Event(3, "engine", 2, StepItem.COMMIT, 1, 1, "r1", ranges=((1, 2),))
    assert fork == Event(4, "engine", 3, StepItem.FORK, 1, 1, "r1", ranges=((1, 3),))
    assert extend == Event(5, "engine", 4, StepItem.EXTEND, 1, 1, "r1", ranges=((4, 5),))
    assert pruned == Event(6, "engine", 5, StepItem.FREE, 2, 1, "r1", ranges=((1, 3),), free_reason=FreeReason.PRUNED)
    assert (free.sequence, free.free_reason, free.ranges) == (1, FreeReason.FINISHED, ((1, 2), (4, 5)))


def test_a_hit_is_recorded_in_tokens_and_an_eviction_by_its_blocks(engine):
    shared = prompt(0, 8)
    engine.cache(1, shared)
    engine.allocate(2, shared + prompt(50, 3))
    engine.free(2)
    engine.allocate(3, prompt(100, 32))
    hit, _, evicting = verb_events(engine)[-3:]
    assert (hit.cached_tokens, hit.evicted) == (8, ())
    assert (evicting.cached_tokens, sorted(evicting.evicted)) == (0, [1, 2])


def test_pins_unpins_resets_and_swaps_are_events():
    engine = Engine(host_blocks=4)
    tokens = prompt(0, 10)
    engine.allocate(1, tokens)
    engine.commit(1, tokens)
    engine.step(pins=[Pin("p", 1, 2)])
    engine.step(swap_outs=[1])
    engine.step(swap_ins=[1])
    engine.step(pins=[Unpin("p"), Reset()])
    pin, out, back, unpin, reset = verb_events(engine)[2:]
    assert (pin.item, pin.request_id, pin.ranges) == (StepItem.PIN, "r1", ((1, 2),))
    assert (out.item, out.request_id, out.ranges) == (StepItem.SWAP_OUT, "r1", ((1, 3),))
    assert (back.item, back.request_id, len(blocks_in(back.ranges))) == (StepItem.SWAP_IN, "r1", 3)
    assert (unpin.item, unpin.request_id, unpin.ranges) == (StepItem.PIN, "", ((1, 2),))
    assert (reset.item, reset.ranges) == (StepItem.PIN, ())


def test_condemns_are_events_with_their_reason_and_tier():
    engine = Engine(host_blocks=4)
    engine.allocate(1, prompt(0, 10))
    items = [Condemn(1, [3, 2, 8], CondemnReason.SWAP_IN), Condemn(5, [1, 2], CondemnReason.COPY, host=True)]
    engine.step(condemns=items)
    engine.step(condemns=items)
    found, of_host = verb_events(engine)[1:]
    assert found == Event(
        *(3, "engine", 2, StepItem.CONDEMN, 1, 1, "r1"),
        ranges=((2, 3), (8, 8)),
        condemn_reason=CondemnReason.SWAP_IN,
    )
    assert of_host == Event(
        *(4, "engine", 2, StepItem.CONDEMN, 5),
        ranges=((1, 2),),
        condemn_reason=CondemnReason.COPY,
        host=True,
    )
    for block, host, numbers in ((3, False, [2, 3]), (8, False, [3]), (2, True, [4]), (3, True, [])):
        events = end_of(engine.ledger.block_events("engine", block, host=host, count=9))
        assert [event.number for event in events] == numbers


def test_a_refusal_is_an_event_with_its_request_and_reason(engine):
    engine.allocate(1, prompt(0, 10))
    engine.step(
        condemns=[Condemn(1, [1, 9], CondemnReason.HIT), Condemn(0, [], CondemnReason.COPY)],
        commits=[Commit(1, 7, prompt(0, 4))],
        pins=[Pin("p", 1, 9), Unpin("q")],
        forks=[Fork(1, 1, 5)],
        frees=[Free(9, FreeReason.PREEMPTED, 3)],
        swap_outs=[1],
        swap_ins=[8],
        extends=[Extend(1, [(1, 400)]), Extend(5, [(77, 1)])],
        allocates=[Allocate(2, 2, "r2", b"", prompt(0, 100), 4, waited_seconds=2.5)],
        lengths=[Length(1, 10_000)],
    )
    events = verb_events(engine)[1:]
    assert [(event.item, event.sequence, event.group, event.request_id, event.refusal) for event in events] == [
        (StepItem.CONDEMN, 1, 1, "r1", StepRefusal.INVALID),
        (StepItem.CONDEMN, 0, 0, "", StepRefusal.INVALID),
        (StepItem.COMMIT, 1, 1, "r1", StepRefusal.INVALID),
        (StepItem.PIN, 1, 1, "r1", StepRefusal.INVALID),
        (StepItem.PIN, 0, 0, "", StepRefusal.UNKNOWN),
        (StepItem.FORK, 1, 1, "r1", StepRefusal.ALREADY_EXISTS),
        (StepItem.FREE, 9, 0, "", StepRefusal.UNKNOWN),
        (StepItem.SWAP_OUT, 0, 1, "r1", StepRefusal.OUT_OF_BLOCKS),
        (StepItem.SWAP_IN, 0, 8, "", StepRefusal.UNKNOWN),
        (StepItem.EXTEND, 1, 1, "r1", StepRefusal.OUT_OF_BLOCKS),
        (StepItem.EXTEND, 77, 5, "", StepRefusal.UNKNOWN),
        (StepItem.ALLOCATE, 2, 2, "r2", StepRefusal.OUT_OF_BLOCKS),
    ]
    assert all(event.detail and event.ranges == () for event in events)
    assert (events[6].free_reason, events[6].preempted_for_group) == (FreeReason.PREEMPTED, 3)
    assert events[-1].waited_seconds == 2.5


def test_lengths_are_no_events(engine):
    engine.allocate(1, prompt(0, 10))
    engine.step(lengths=[Length(1, 10), Length(7, 1)])
    assert len(verb_events(engine)) == 1


def test_an_id_reused_in_the_step_that_freed_it_belongs_to_the_new_request(engine):
    engine.allocate(1, prompt(0, 4))
    again = Allocate(1, 1, "again", b"", prompt(9, 4), 4)
    engine.step(frees=[Free(1, FreeReason.FINISHED)], allocates=[again])
    engine.extend(1, 8)
    assert [event.request_id for event in verb_events(engine)] == ["r1", "r1", "again", "again"]


def test_sequences_of_an_adopted_pool_keep_their_request_ids(engine):
    engine.allocate(1, prompt(0, 10))
    adoption = adopt(engine.spec, report_of(engine.session.pool))
    engine.session = engine.manager.attach(engine.spec, end_of(adoption))
    engine.extend(1, 14)
    event = kept(engine.ledger)[-1]
    assert (event.request_id, event.item) == ("r1", StepItem.EXTEND)
    assert engine.ledger.explain("r1").blocks == 4


# The ring


def steps_of(engine, draw):
    for _ in range(draw(st.integers(0, 12))):
        live = list(engine.session.pool.sequences) or [1]
        pick = st.sampled_from(live)
        match draw(st.sampled_from(["allocate", "allocate", "commit", "extend", "fork", "free", "pin", "condemn"])):
            case "allocate":
                engine.allocate(draw(st.integers(1, 12)), draw(st.lists(TOKENS, min_size=1, max_size=20)))
            case "commit":
                engine.step(commits=[Commit(draw(pick), draw(st.integers(0, 2)), draw(st.lists(TOKENS, max_size=8)))])
            case "extend":
                engine.extend(draw(pick), draw(st.integers(1, 30)))
            case "fork":
                engine.step(forks=[Fork(draw(pick), draw(st.integers(13, 20)), draw(st.integers(1, 20)))])
            case "free":
                engine.free(draw(pick), draw(st.integers(1, 30)))
            case "pin":
                engine.step(pins=[Pin("p", draw(pick), 1), Unpin("p")])
            case "condemn":
                blocks = draw(st.lists(st.integers(1, 9), max_size=2))
                engine.step(condemns=[Condemn(draw(pick), blocks, draw(st.sampled_from(CondemnReason)))])


@given(st.data(), st.integers(1, 30), st.integers(500, 10_000))
def test_event_numbers_have_no_gaps_and_the_bound_holds(data, most, weight):
    engines = [Engine(KVManager(epoch=1, ledger=Ledger(most, weight)), "a")]
    engines.append(Engine(engines[0].manager, "b"))
    for _ in range(3):
        steps_of(data.draw(st.sampled_from(engines)), data.draw)
    ledger = engines[0].ledger
    events = kept(ledger)
    assert [event.number for event in events] == list(range(ledger.first_kept, ledger.next_number))
    assert len(events) <= most
    entries = [Entry(*entry) for entry in ledger._entries]
    assert len(entries) == 1 or sum(entry.weight for entry in entries) <= weight


@given(st.data())
def test_a_small_ring_keeps_the_same_last_events_as_a_large_one(data):
    engine = Engine(KVManager(epoch=1, ledger=Ledger(events=5)))
    large = Ledger()
    large.attached("engine")
    record = engine.ledger.record

    def record_both(*step):
        record(*step)
        large.record(*step)

    engine.ledger.record = record_both
    steps_of(engine, data.draw)
    assert kept(engine.ledger) == kept(large)[-5:]


@given(st.data(), st.integers(0, 60), st.integers(1, 7))
def test_a_page_starts_at_the_given_number_and_respects_its_limit(data, start, most):
    engine = Engine()
    steps_of(engine, data.draw)
    everything = kept(engine.ledger)
    page = engine.ledger.events(start, most)
    wanted = [event for event in everything if event.number >= start][:most]
    assert list(page.events) == wanted
    assert page.first == (wanted[0].number if wanted else engine.ledger.next_number)


def test_a_page_of_dropped_events_starts_at_the_first_kept_number():
    ledger = Ledger(events=3)
    for name in "abcde":
        ledger.attached(name)
    page = ledger.events(1, 10)
    assert (page.first, [event.number for event in page.events]) == (3, [3, 4, 5])


def test_a_page_stays_valid_while_more_is_recorded():
    ledger = Ledger(events=3)
    for name in "abc":
        ledger.attached(name)
    page = ledger.events(1, 10)
    for name in "defg":
        ledger.attached(name)
    assert [event.engine_id for event in page.events] == ["a", "b", "c"]


def test_long_tables_count_for_more_than_short_ones():
    kept_events = []
    for tokens in (4, 4000):
        engine = Engine(KVManager(epoch=1, ledger=Ledger(events=100, weight=12_000)), blocks=1000)
        for sequence in range(1, 6):
            engine.allocate(sequence, prompt(1000 * sequence, tokens))
            engine.free(sequence)
        kept_events.append(len(kept(engine.ledger)))
    assert kept_events[1] < kept_events[0] / 2


def long_texts(engine, number):
    engine.step(allocates=[Allocate(0, -1, f"{number}" * 200, b"", [1], 1)])


def many_refusals(engine, number):
    engine.step(frees=[Free(number * 10_000 + one, FreeReason.FINISHED) for one in range(700)])


def long_tables(engine, number):
    engine.allocate(number, [number] * 3000)
    engine.free(number)


def many_requests(engine, number):
    ids = range(number * 1000, number * 1000 + 300)
    engine.step(allocates=[Allocate(one, one, f"request-{one}", b"", [one], 1) for one in ids])
    engine.step(frees=[Free(one, FreeReason.FINISHED) for one in ids])


@pytest.mark.parametrize(
    ("steps", "count"), [(long_texts, 300), (many_refusals, 30), (long_tables, 300), (many_requests, 30)]
)
def test_the_ledger_uses_no_more_memory_than_its_weight(steps, count):
    engine = Engine(KVManager(epoch=1, ledger=Ledger(weight=400_000)), blocks=1000)
    tracemalloc.start()
    try:
        engine.ledger.flush()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, count):
            steps(engine, number)
        engine.ledger.flush()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 600_000, "includes the pool's own memory"


# Ranges


@given(st.sets(st.integers(1, 60)), st.randoms())
def test_ranges_cover_exactly_the_blocks(blocks, random):
    order = list(blocks)
    random.shuffle(order)
    ranges = block_ranges(order)
    assert blocks_in(ranges) == sorted(blocks)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(ranges))


@given(st.data())
def test_the_ranges_of_events_are_the_blocks_of_the_effects(data):
    engine = Engine()
    results = []
    apply = engine.manager.apply
    engine.manager.apply = lambda *step: results.append(apply(*step)) or results[-1]
    steps_of(engine, data.draw)
    effects = [effect for applied in results for effect in applied.effects]
    done = [event for event in verb_events(engine) if event.refusal is None]
    assert [blocks_in(event.ranges) for event in done] == [sorted(blocks) for _, _, _, blocks, _, _ in effects]
    evicted = [[block for block, _ in evicted] for _, _, _, _, evicted, _ in effects]
    assert [list(event.evicted) for event in done] == evicted


def everything_in(value):
    """Yield every plain value of an object, private fields included."""
    if isinstance(value, (str, int, float, bytes)) or value is None:
        yield value
    elif isinstance(value, Enum):
        yield value.name
    elif isinstance(value, dict):
        yield from everything_in(list(value.items()))
    elif hasattr(value, "__iter__"):
        for one in value:
            yield from everything_in(one)
    else:
        names = getattr(value, "__slots__", None) or vars(value)
        for name in names:
            yield from everything_in(getattr(value, name))


@given(st.data())
def test_no_token_id_is_anywhere_in_the_ledger(data):
    engine = Engine()
    steps_of(engine, data.draw)
    for found in [*everything_in(kept(engine.ledger)), *everything_in(engine.ledger)]:
        assert not (isinstance(found, (int, float)) and 1_900_000_000 <= found <= 1_900_000_999)
        assert not (isinstance(found, str) and "19000" in found)
        if isinstance(found, bytes) and len(found) % 32:
            assert not any(1_900_000_000 <= number <= 1_900_000_999 for number in array("i", found[: len(found) & -4]))


def test_no_key_is_in_any_event(engine):
    shared = prompt(0, 8)
    engine.cache(1, shared)
    engine.allocate(2, prompt(100, 32))
    assert not [found for event in verb_events(engine) for found in everything_in(event) if isinstance(found, bytes)]


def test_the_garbage_collector_does_not_track_every_event():
    engine = Engine(blocks=2000)
    tokens = prompt(0, 400)
    engine.allocate(1, tokens)
    for end in range(404, 4400, 4):
        engine.extend(1, end)
    for _ in range(3):
        gc.collect()
    entries = list(engine.ledger._entries)
    assert len(entries) > 900
    assert sum(map(gc.is_tracked, entries)) < 50
