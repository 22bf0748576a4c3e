"""What the ledger has of window kinds: trims, and the blocks of each kind, for people who look for a block."""

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
    Step,
    StepItem,
    Trim,
    WindowKind,
)
from kvmanager import KVManager, PoolSpec
from kvmanager.effects import Allocation
from kvmanager.history.events import Entry
from kvmanager.history.explanation import HeldInWindow, LeftWindow
from services.kvmanager.renderer import sentence, summary

WINDOW = WindowKind("window-5", tokens=5, device_blocks=6)
PROMPT = [*range(12)]


def a_manager():
    """A manager with the sequence of one request, of which logical block 0 has left the window in step 90."""
    manager = KVManager(epoch=1)
    session = manager.attach(PoolSpec("engine", 1, "model", 4, 8, windows=(WINDOW,)))
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", PROMPT, 12)]))
    manager.apply(
        session,
        Step(90, commits=[Commit(1, 0, PROMPT)], trims=[Trim(1, 9)], extends=[Extend(1, ((1, 16),))]),
    )
    return manager, session


def without_sequences():
    manager = KVManager(epoch=1)
    return manager, manager.attach(PoolSpec("engine", 1, "model", 4, 40, windows=(WINDOW,)))


def compute(manager, session, number, request, text, reason=FreeReason.FINISHED):
    """Compute a text in the steps from ten times `number` on, and end its sequence."""
    step = 10 * number
    allocate = Allocate(number, number, request, b"", text, len(text))
    assert not manager.apply(session, Step(step, allocates=[allocate])).result.refusals
    cached = session.pool.sequences[number].committed_blocks
    commit = Commit(number, cached, text[4 * cached : len(text) // 4 * 4])
    computed = Step(step + 1, lengths=[Length(number, len(text))], commits=[commit], trims=[Trim(number, len(text))])
    assert not manager.apply(session, computed).result.refusals
    manager.apply(session, Step(step + 2, frees=[Free(number, reason)]))


def events(manager):
    return list(manager.ledger.events(0, 100).events)


def explained(manager, request):
    return summary(manager.ledger.explain(request))


def test_the_explanation_says_which_tokens_left_the_window() -> None:
    manager, _ = a_manager()
    explanation = manager.ledger.explain("request")
    [found] = [one for one in explanation.findings if isinstance(one, LeftWindow)]
    assert found == LeftWindow("window-5", steps=(90, 90), tokens=(0, 3), entries=1, sequences=1)
    assert "Its tokens 0 to 3 left the window of kind window-5 in step 90 (1 block)." in summary(explanation)
    # Blocks of kind 0 are counted, and no allocation twice.
    assert (explanation.blocks, explanation.max_blocks) == (4, 4)
    assert summary(explanation).count("It was scheduled") == 1


def test_several_trims_are_one_sentence() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(95, lengths=[Length(1, 16)], trims=[Trim(1, 16)], extends=[Extend(1, ((1, 20),))]))
    text = explained(manager, "request")
    assert "Its tokens 0 to 11 left the window of kind window-5 in steps 90 to 95 (3 blocks)." in text


def test_trims_of_several_sequences_are_one_sentence_too() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(91, lengths=[Length(1, 16)], forks=[Fork(1, 2, 16)]))
    manager.apply(session, Step(95, trims=[Trim(1, 16), Trim(2, 16)]))
    assert (
        "Its tokens 0 to 11 left the window of kind window-5 in steps 90 to 95 (5 table entries of 2 sequences)."
    ) in explained(manager, "request")


def test_blocks_that_left_the_window_before_a_preemption_are_a_sentence_of_their_own() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(91, frees=[Free(1, FreeReason.PREEMPTED, 9)]))
    manager.apply(session, Step(92, allocates=[Allocate(1, 3, "request", b"", [*PROMPT, *range(50, 58)], 8)]))
    manager.apply(session, Step(93, lengths=[Length(3, 20)], trims=[Trim(3, 20)]))
    text = explained(manager, "request")
    first = text.index("Its tokens 0 to 3 left the window of kind window-5 in step 90 (1 block).")
    assert first < text.index("It was scheduled again")
    assert text.index("Its tokens 8 to 15 left the window of kind window-5 in step 93 (2 blocks).") > first


def test_held_blocks_are_those_of_each_kind() -> None:
    manager, session = a_manager()
    held = "4 blocks of the layers that keep all tokens, 3 of kind window-5"
    assert explained(manager, "request").endswith(f"It holds {held} now. It held at most {held}.")
    manager.apply(session, Step(95, lengths=[Length(1, 16)], trims=[Trim(1, 16)]))
    explanation = manager.ledger.explain("request")
    assert explanation.windows == (HeldInWindow("window-5", 1, 3),)
    assert explanation.windows[0].blocks == len(session.pool.windows[0].sequences[1].table)


def test_blocks_that_a_window_kind_lacks_are_the_reason_of_a_shorter_hit() -> None:
    manager, session = without_sequences()
    compute(manager, session, 2, "first", [*range(100, 124)])
    for number, cached in ((3, 0), (4, 8)):
        own = range(10 * number, 10 * number + 10)
        compute(manager, session, number, f"branch {number}", [*range(100, 110), *own])
        assert f"{cached} of its 20 tokens were cached" in explained(manager, f"branch {number}")
    assert (
        "0 of its 20 tokens were cached: 8 tokens were cached in the layers that keep all tokens, but blocks of kind "
        "window-5 that the next token needs were not (--retention-tokens keeps more of them)."
    ) in explained(manager, "branch 3")
    # Kind 0 has no more tokens here: the window kind is not the reason.
    assert "8 of its 20 tokens were cached: logical block 2 was not cached" in explained(manager, "branch 4")


def test_a_preempted_request_whose_window_was_evicted_says_so() -> None:
    manager, session = without_sequences()
    text = [*range(20)]
    compute(manager, session, 1, "victim", text, FreeReason.PREEMPTED)
    compute(manager, session, 2, "other", [*range(50, 74)])
    compute(manager, session, 3, "victim", [*text, 99])
    assert (
        "It was scheduled again by engine engine in step 30. 0 of its 21 tokens were cached: 20 tokens were cached in "
        "the layers that keep all tokens, but blocks of kind window-5 that the next token needs were not; one of them "
        "was last evicted in step 20 for the allocation of request other."
    ) in explained(manager, "victim")


def test_an_eviction_is_that_of_the_kind_which_misses_the_block() -> None:
    key = b"k" * 32
    allocates, counts = bytes([StepItem.ALLOCATE.value] * 3), (0, 2, 1)
    entry = Entry(1, 1, 1, items=allocates, eviction_counts=counts, evicted_keys=key + b"x" * 32 + key, kinds=b"\0\0\1")
    assert [entry.evictor(key, kind) for kind in (0, 1, 2)] == [1, 2, None]
    assert entry.evictor(b"y" * 32) is None


def test_each_event_names_its_kind() -> None:
    manager, _ = a_manager()
    sentences = [sentence(event) for event in events(manager)]
    assert "Block 1 of kind window-5 left the window of sequence 1 (request)." in sentences
    assert "Sequence 1 (request) was granted block 4." in sentences
    assert any(one.startswith("Sequence 1 (request) was granted block") and "window-5" in one for one in sentences)
    committed = [one for one in sentences if "committed" in one]
    assert len(committed) == 1, "kinds have the same commits"


def test_a_block_is_followed_in_its_own_kind() -> None:
    manager, _ = a_manager()
    ledger = manager.ledger
    of_kind = [list(_drained(ledger.block_events("engine", 1, host=False, count=9, kind=kind))) for kind in (0, 1)]
    assert [[event.item.name for event in found] for found in of_kind] == [
        ["ALLOCATE", "COMMIT"],
        ["ALLOCATE", "TRIM", "EXTEND"][: len(of_kind[1])],
    ]


def test_a_freed_sequence_keeps_its_request_in_all_kinds() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(91, frees=[Free(1, FreeReason.FINISHED)]))
    freed = [event for event in events(manager) if event.free_reason is FreeReason.FINISHED]
    assert [(event.kind, event.request_id) for event in freed] == [("", "request"), ("window-5", "request")]
    assert "It finished in step 91." in summary(manager.ledger.explain("request"))


def test_a_hit_names_its_boundary_in_each_kind() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(91, frees=[Free(1, FreeReason.FINISHED)]))
    manager.apply(session, Step(92, allocates=[Allocate(2, 2, "again", b"", PROMPT, 12)]))
    admission = manager.ledger.explain("again").findings[0].admission
    assert isinstance(admission, Allocation)
    assert (admission.cached_tokens, admission.hit_blocks) == (8, 2)


def test_withheld_blocks_of_a_window_kind_are_recorded_by_kind() -> None:
    manager, session = a_manager()
    tier = session.pool.windows[0].device
    tier.keys.seal(6, b"k" * 32)  # a free block with a key
    violations = [one for found in manager.audit(session) for one in found]
    assert {one.kind for one in violations} == {1}
    withheld = [event for event in events(manager) if event.change]
    assert [sentence(event) for event in withheld[1:]] == ["The audit withheld block 6 of kind window-5."]


def test_condemned_blocks_are_recorded_by_kind_and_tier() -> None:
    manager = KVManager(epoch=1)
    window = WindowKind("window-5", tokens=5, device_blocks=6, host_blocks=4)
    session = manager.attach(PoolSpec("engine", 1, "model", 4, 8, 8, windows=(window,)))
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", PROMPT, 12)]))
    condemns = [
        Condemn(1, [2], CondemnReason.ADOPTION),
        Condemn(1, [2, 3], CondemnReason.HIT, kind=1),
        Condemn(1, [2], CondemnReason.HOST_HIT, host=True),
        Condemn(1, [2], CondemnReason.COPY, host=True, kind=1),
    ]
    assert manager.apply(session, Step(2, condemns=condemns)).result.refusals == ()
    for kind, host, reason in (
        *((0, False, CondemnReason.ADOPTION), (1, False, CondemnReason.HIT)),
        *((0, True, CondemnReason.HOST_HIT), (1, True, CondemnReason.COPY)),
    ):
        found = _drained(manager.ledger.block_events("engine", 2, host=host, count=9, kind=kind))
        assert [event.condemn_reason for event in found if event.item is StepItem.CONDEMN] == [reason]
        assert {event.kind for event in found} == {"window-5" if kind else ""}
    text = explained(manager, "request")
    for expected in (
        "Block 2 was condemned in step 2: checksum differs after adoption.",
        "2 blocks (2-3) of kind window-5 were condemned in step 2: checksum differs at a hit.",
        "Block 2 of the host tier was condemned in step 2: checksum differs after a hit in the host tier.",
        "Block 2 of kind window-5 of the host tier was condemned in step 2: a copy failed.",
    ):
        assert expected in text
    # Condemned blocks are held as before.
    assert text.endswith("It held at most 3 blocks of the layers that keep all tokens, 3 of kind window-5.")


def _drained(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
