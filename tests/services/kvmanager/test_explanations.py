"""Rendered explanations of requests, from the events in the ledger."""

import pytest

from blocks import Allocate, Condemn, CondemnReason, Extend, Fork, Free, FreeReason, Reset, StepItem
from kvmanager import Event, KVManager, Ledger, UnknownRequest
from services.kvmanager.renderer import sentence, summary
from tests.kvmanager.history.test_ledger import Engine, prompt
from tests.kvmanager.tiny_pools import end_of


@pytest.fixture
def engine():
    return Engine()


def explained(engine, request_id):
    return summary(engine.ledger.explain(request_id))


def test_the_explanation_of_a_request_that_waited_was_admitted_and_finished(engine):
    engine.allocate(1, prompt(0, 24))
    for waited in (0.0, 0.1):
        engine.allocate(2, prompt(100, 12), waited_seconds=waited)
    engine.free(1)
    engine.allocate(2, prompt(100, 12), waited_seconds=0.25)
    engine.extend(2, 16)
    engine.free(2)
    explanation = engine.ledger.explain("r2")
    assert [(event.item.name, event.refusal is None) for event in explanation.events] == [
        ("ALLOCATE", False),
        ("ALLOCATE", False),
        ("ALLOCATE", True),
        ("EXTEND", True),
        ("FREE", True),
    ]
    assert summary(explanation) == (
        "Its allocation was refused as out_of_blocks 2 times in steps 2 to 3: 3 blocks are needed, 2 are available. "
        "It was scheduled by engine engine in step 5, 3 steps after it was first refused, queued for 0.25 seconds. "
        "0 of its 12 tokens were cached: logical block 0 was not cached, and no eviction is recorded. "
        "It finished in step 7. "
        "It held at most 4 blocks."
    )


def test_the_explanation_of_a_hit_has_its_cached_tokens(engine):
    shared = prompt(0, 8)
    engine.cache(1, shared)
    engine.allocate(2, [*shared, 99])
    assert explained(engine, "r2") == (
        "It was scheduled by engine engine in step 4. 8 of its 9 tokens were cached. "
        "It holds 3 blocks now. It held at most 3 blocks."
    )


def test_the_explanation_names_the_request_that_computed_the_prefix_meanwhile(engine):
    shared = prompt(0, 8)
    engine.cache(1, shared)
    engine.allocate(2, [*shared, 99], waited_seconds=0.25, prefix_of="r1")
    assert explained(engine, "r2").startswith(
        "It was scheduled by engine engine in step 4, queued for 0.25 seconds, while request r1 computed their common "
        "prefix. 8 of its 9 tokens were cached. "
    )


def test_the_explanation_of_a_miss_names_the_verb_that_evicted_the_block(engine):
    shared = prompt(0, 16)
    engine.cache(1, shared)
    engine.allocate(2, prompt(100, 16))  # four of the eight blocks are free
    engine.extend(2, 24)  # and two of the other four lose their keys
    engine.allocate(3, [*shared, 99][:9])
    engine.free(2)
    engine.allocate(4, [*shared, 99])
    text = explained(engine, "r4")
    assert (
        "8 of its 17 tokens were cached: logical block 2 was evicted in step 5 for the extension of request r2."
    ) in text


def test_the_last_of_several_evictions_of_a_block_is_explained(engine):
    shared = prompt(0, 8)
    for round_ in range(3):
        engine.cache(10 + round_, shared)
        engine.allocate(20 + round_, prompt(1000 * (round_ + 1), 32))
        engine.free(20 + round_)
    engine.allocate(30, [*shared, 1])
    assert "was evicted in step 14 for the allocation of request r22." in explained(engine, "r30")


def test_the_explanations_of_victim_and_preempting_request_name_each_other(engine):
    engine.allocate(1, prompt(0, 16))
    engine.allocate(2, prompt(100, 16))
    engine.extend(1, 20)
    engine.step(frees=[Free(2, FreeReason.PREEMPTED, 1)], extends=[Extend(1, [(1, 20)])])
    assert explained(engine, "r1").endswith(
        "Its extension was refused as out_of_blocks in step 3: none of the 8 blocks is available. "
        "Request r2 was preempted for it in step 4 and released 4 blocks. "
        "It holds 5 blocks now. It held at most 5 blocks."
    )
    assert explained(engine, "r2").endswith(
        "It was preempted in step 4 for request r1. It has not been scheduled again: it still waits, or it ended "
        "without blocks. It held at most 4 blocks."
    )
    engine.free(1)
    engine.allocate(2, prompt(100, 17))
    assert "It was scheduled again by engine engine in step 6." in explained(engine, "r2")


def test_the_explanation_of_a_group_counts_shared_blocks_once_and_ends_with_its_last_sequence(engine):
    engine.allocate(1, prompt(0, 8))
    engine.step(forks=[Fork(1, 2, 8)])
    engine.step(extends=[Extend(1, [(1, 12), (2, 12)])])
    engine.free(2, reason=FreeReason.PRUNED)
    assert explained(engine, "r1").endswith("It holds 3 blocks now. It held at most 4 blocks.")
    engine.free(1, reason=FreeReason.CANCELLED)
    assert explained(engine, "r1").endswith("It was cancelled in step 5. It held at most 4 blocks.")


def test_the_explanation_of_a_swap_says_when_and_where():
    engine = Engine(host_blocks=4)
    engine.allocate(1, prompt(0, 8))
    engine.step(swap_outs=[1])
    assert "It was swapped out to host memory in step 2. It is swapped out." in explained(engine, "r1")
    engine.step(swap_ins=[1])
    swapped_in = "It was swapped in from host memory in step 3, 1 step after that."
    assert f"{swapped_in} It holds 2 blocks now." in explained(engine, "r1")


def test_the_explanation_of_a_request_whose_pool_was_dropped_says_so(engine):
    engine.allocate(1, prompt(0, 8))
    engine.manager.detach(engine.session)
    assert "Its pool was dropped while it held blocks." in explained(engine, "r1")


def test_the_explanation_of_a_request_that_was_only_refused_says_that_it_was_not_admitted(engine):
    engine.allocate(1, prompt(0, 100))
    assert explained(engine, "r1") == (
        "Its allocation was refused as out_of_blocks in step 1: 25 blocks are needed, 8 are available. "
        "It has not been scheduled: it still waits, or it ended without blocks."
    )


def test_a_refusal_names_the_blocks_of_the_request_and_those_that_must_stay_free(engine):
    engine.allocate(1, prompt(0, 8))
    engine.step(allocates=[Allocate(2, 2, "r2", b"", prompt(100, 20), 20, spare_blocks=3)])
    assert explained(engine, "r2").startswith(
        "Its allocation was refused as out_of_blocks in step 2: 5 blocks are needed and 3 more must stay free, "
        "6 are available. "
    )


def test_a_refusal_counts_the_cached_prefix_apart_from_needed_and_available_blocks(engine):
    engine.cache(1, prompt(0, 12))
    engine.allocate(2, prompt(100, 16))
    engine.allocate(3, [*prompt(0, 12), *prompt(200, 8)])
    assert explained(engine, "r3").startswith(
        "Its allocation was refused as out_of_blocks in step 5: 2 blocks are needed, 1 is available beside 3 with its "
        "cached prefix. "
    )


FAULTS = {
    CondemnReason.ADOPTION: "checksum differs after adoption",
    CondemnReason.SWAP_IN: "checksum differs after swap in",
    CondemnReason.HOST_HIT: "checksum differs after a hit in the host tier",
    CondemnReason.HIT: "checksum differs at a hit",
    CondemnReason.COPY: "a copy failed",
    CondemnReason.RECOMPUTATION: "contents differ from recomputation",
}


@pytest.mark.parametrize("reason", CondemnReason)
def test_an_explanation_names_the_condemned_blocks_that_the_request_found_and_why(engine, reason):
    engine.allocate(1, prompt(0, 12))
    engine.step(condemns=[Condemn(1, [2, 3], reason)])
    assert explained(engine, "r1").endswith(
        f"2 blocks (2-3) were condemned in step 2: {FAULTS[reason]}. It holds 3 blocks now. It held at most 3 blocks."
    )
    (event,) = [one for one in engine.ledger.explain("r1").events if one.condemn_reason]
    assert sentence(event) == f"2 blocks (2-3) were condemned, found by sequence 1 (r1): {FAULTS[reason]}."


def test_blocks_that_no_live_sequence_found_are_in_no_explanation_but_in_the_events_of_the_block():
    engine = Engine(host_blocks=4)
    engine.cache(1, prompt(0, 12))
    engine.step(condemns=[Condemn(0, [2], CondemnReason.COPY), Condemn(1, [1], CondemnReason.HOST_HIT, host=True)])
    assert "condemned" not in explained(engine, "r1")
    of_block = end_of(engine.ledger.block_events("engine", 2, host=False, count=1))
    assert [sentence(event) for event in of_block] == ["Block 2 was condemned: a copy failed."]
    of_block = end_of(engine.ledger.block_events("engine", 1, host=True, count=1))
    assert [sentence(event) for event in of_block] == [
        "Block 1 of the host tier was condemned, found by sequence 1: checksum differs after a hit in the host tier."
    ]


def test_a_refused_condemn_of_no_sequence_names_none(engine):
    engine.step(condemns=[Condemn(0, [99], CondemnReason.COPY)])
    (event,) = [one for one in engine.ledger.events(0, 9).events if one.item is StepItem.CONDEMN]
    assert sentence(event) == ("The condemn was refused: blocks must be between 1 and 8, the device blocks, not 99.")


def test_an_explanation_states_that_its_first_events_were_dropped():
    engine = Engine(KVManager(epoch=1, ledger=Ledger(events=2)))
    engine.allocate(1, prompt(0, 8))
    engine.extend(1, 12)
    engine.free(1)
    assert explained(engine, "r1") == (
        "Events before number 3 are no longer kept. It finished in step 3. It held at most 3 blocks."
    )


def test_a_request_on_two_engines_has_one_explanation():
    engine = Engine()
    other = Engine(engine.manager, "other")
    engine.allocate(1, prompt(0, 8))
    engine.free(1, reason=FreeReason.FAILED)
    other.allocate(1, prompt(0, 9))
    assert "It failed in step 2. It was scheduled again by engine other in step 1." in explained(engine, "r1")


@pytest.mark.parametrize("request_id", ["r2", ""])
def test_a_request_without_kept_events_is_unknown_for_one_of_four_reasons(request_id):
    engine = Engine(KVManager(epoch=1, ledger=Ledger(events=2)))
    reasons = "it does not exist, still waits for its turn, ended before that, or its events are older than"
    for oldest in ("this KV manager", "number 4, the oldest that is kept"):
        with pytest.raises(UnknownRequest, match=f"{reasons} {oldest}$"):
            engine.ledger.explain(request_id)
        engine.cache(1, prompt(0, 8))
        engine.step(pins=[Reset()])


def test_an_explanation_covers_only_events_before_it_was_requested(engine):
    engine.allocate(1, prompt(0, 8))
    slices = engine.ledger.explaining("r1")
    next(slices)
    engine.free(1)
    assert [event.item for event in end_of(slices).events] == [StepItem.ALLOCATE]


@pytest.mark.parametrize(("others", "named"), [(0, ""), (1, " and 1 more range"), (2, " and 2 more ranges")])
def test_an_event_names_at_most_four_ranges_of_blocks(others, named):
    ranges = tuple((first, first) for first in range(1, 2 * (4 + others), 2))
    event = Event(1, "engine", item=StepItem.EXTEND, sequence=1, ranges=ranges)
    assert sentence(event) == f"Sequence 1 was granted {4 + others} blocks (1, 3, 5, 7{named})."


def test_the_explanation_of_a_request_that_held_a_condemned_block_says_why_it_was_preempted(engine):
    engine.allocate(1, prompt(0, 12))
    engine.step(condemns=[Condemn(1, [2], CondemnReason.ADOPTION)], frees=[Free(1, FreeReason.PREEMPTED)])
    engine.allocate(1, prompt(0, 12))
    assert "Block 2 was condemned in step 2: checksum differs after adoption." in explained(engine, "r1")
    assert "It was preempted in step 2, because it held condemned blocks." in explained(engine, "r1")
