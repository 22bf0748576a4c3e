"""What the ledger has of window kinds: trims, and the blocks of each kind, for people who look for a block."""

from blocks import Allocate, Commit, Extend, Free, FreeReason, Length, Step, Trim, WindowKind
from kvmanager import KVManager, PoolSpec
from kvmanager.effects import Allocation
from kvmanager.history.explanation import LeftWindow
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


def events(manager):
    return list(manager.ledger.events(0, 100).events)


def test_the_explanation_says_which_blocks_left_the_window() -> None:
    manager, _ = a_manager()
    explanation = manager.ledger.explain("request")
    [found] = [one for one in explanation.findings if isinstance(one, LeftWindow)]
    [trim] = found.events
    assert (trim.step, trim.kind, trim.ranges, trim.request_id) == (90, "window-5", ((1, 1),), "request")
    assert "Block 1 of kind window-5 left the window in step 90." in summary(explanation)
    # Blocks of kind 0 are counted, and no allocation twice.
    assert (explanation.blocks, explanation.max_blocks) == (4, 4)
    assert summary(explanation).count("It was scheduled") == 1


def test_several_trims_are_one_sentence() -> None:
    manager, session = a_manager()
    manager.apply(session, Step(95, lengths=[Length(1, 16)], trims=[Trim(1, 16)], extends=[Extend(1, ((1, 20),))]))
    assert "3 blocks of kind window-5 left the window in steps 90 to 95, the last 2 blocks (2-3)." in summary(
        manager.ledger.explain("request")
    )


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


def _drained(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
