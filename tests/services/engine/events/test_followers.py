"""A listener ends with exactly the publisher's blocks, whatever it missed: compared with the publisher's own state."""

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.events.changes import Cleared, Stored
from services.engine.events.event_stream import EventBatch, EventStream
from services.engine.events.zeromq.follower import Follower, HeldBlocks
from services.engine.events.zeromq.snapshots import (
    MOST_FILLED,
    Numbering,
    SnapshotOutgrown,
    consecutive,
    make_room,
    snapshot,
)
from services.engine.events.zeromq.vllm_format import (
    FULL_ATTENTION,
    SLIDING_WINDOW,
    AttentionKind,
    Encoder,
    WireEvent,
    decode,
)
from tests.key_changes import BLOCK_SIZE, Keys, stored

EPOCH = 1 << 40
KINDS = [AttentionKind(FULL_ATTENTION), AttentionKind(SLIDING_WINDOW, 8)]


class Wire:
    """An engine and a listener, with a network between them that loses messages and interrupts answers."""

    def __init__(self, seed: int, history: int, loss: float, *, arrays: bool, epoch: int = EPOCH) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.history = history
        self.encoder = Encoder(BLOCK_SIZE, KINDS, arrays=arrays)
        self.follower = Follower()
        self.snapshots = 0
        self.changes_meanwhile = 0.1
        self.listening = True
        self.start(epoch)

    def start(self, epoch: int) -> None:
        """A new process of the engine, with an empty pool. Listeners know its numbers, or notice a lost connection."""
        if not epoch:
            self.follower.restart()
        self.stream = EventStream(epoch, lambda: 1.0, self.history)
        self.keys = Keys(self.stream, self.random.randint(0, 1 << 30))
        self.stream.listen(self.hear)

    def hear(self, batch: EventBatch) -> None:
        if not self.listening or self.random.random() < self.loss:
            return
        first = self.follower.missing(batch.sequence)
        if first is not None and not self.replay(first):
            self.follower.restart()
        else:
            self.follower.apply(batch.sequence, self.passed(batch))

    def passed(self, batch: EventBatch) -> list[WireEvent]:
        return decode(self.encoder.encode(batch))

    def replay(self, first: int) -> bool:
        """Apply an answer; return False if it was interrupted. Events go on while a snapshot is made."""
        for batch in self.answer(first):
            if batch is None or self.random.random() < self.loss / 4:
                self.listening = True
                return False
            self.follower.apply(batch.sequence, self.passed(batch), replayed=True)
        return True

    def parts(self, first: int) -> Iterable[EventBatch | range | None]:
        batches = snapshot(self.stream, first)
        return consecutive(batches) if self.stream.from_zero else batches

    def answer(self, first: int) -> Iterator[EventBatch | None]:
        """Yield the batches of an answer; None if events came faster than these."""
        if self.stream.resume(first).batches is None:
            self.snapshots += 1
            self.listening = False  # what it would hear meanwhile is in the answer
            make_room(self.stream)
            begun = self.stream.next_sequence
            for part in self.parts(first):
                if self.random.random() < self.changes_meanwhile:
                    self.keys.change()
                if isinstance(part, range):
                    yield from (EventBatch(number, 1.0, []) for number in part)
                elif part:
                    yield part
            self.listening = True
            first = begun
        found = self.stream.resume(first).batches
        yield from [None] if found is None else found


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([5, 20, 1000]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.booleans(),
    st.sampled_from([EPOCH, 0]),
)
def test_a_listener_that_loses_messages_ends_with_the_publishers_blocks(
    seed: int, history: int, loss: float, arrays: bool, epoch: int
) -> None:
    wire = Wire(seed, history, loss, arrays=arrays, epoch=epoch)
    for turn in range(150):
        wire.keys.change()
        if wire.random.random() < 0.01:
            epoch += (1 << 20) * bool(epoch)
            wire.start(epoch)
        if wire.random.random() < 0.02:  # it is stopped for a while
            wire.listening = False
        if turn % 10 == 9:
            wire.listening = True
    wire.loss = wire.changes_meanwhile = 0.0
    wire.listening = True
    wire.stream.publish([])
    assert wire.follower.held.counts() == {place: len(found) for place, found in wire.keys.state().items()}
    assert {place: found for place, found in wire.follower.held.places.items() if found} == wire.keys.state()


def test_a_late_listener_begins_with_a_snapshot() -> None:
    wire = Wire(1, 5, 0.0, arrays=False)
    wire.listening = False
    for _ in range(50):
        wire.keys.change()
    wire.listening = True
    wire.stream.publish([])
    assert wire.snapshots == 1
    assert dict(wire.follower.held.places) == wire.keys.state()


def test_lower_numbers_are_those_of_another_process() -> None:
    follower = Follower()
    assert follower.missing(7) == 0
    follower.apply(7, [])
    assert follower.missing(8) is None
    follower.apply(8, decode(Encoder(BLOCK_SIZE, KINDS).encode(EventBatch(8, 0.0, [stored(0, 2)]))))
    assert follower.missing(3) == 0
    assert (follower.held.counts(), follower.restarts) == ({}, 1)


def test_batches_that_were_neither_received_nor_replayed_are_counted() -> None:
    follower = Follower()
    follower.apply(7, [])
    assert follower.missing(11) == 8
    follower.apply(11, [])
    assert follower.lost == 3


def with_blocks(blocks: int, history: int = 100) -> EventStream:
    stream = EventStream(EPOCH, lambda: 1.0, history)
    Keys(stream, 0).grow(blocks)
    return stream


def numbers(stream: EventStream, asked: int) -> list[int]:
    return [batch.sequence for batch in snapshot(stream, asked) if batch]


@pytest.mark.parametrize("asked", [0, 17, EPOCH - 50])
def test_numbers_of_a_snapshot_rise_from_the_wanted_one_and_end_at_the_last(asked: int) -> None:
    stream = with_blocks(1000)
    found = numbers(stream, asked)
    assert found[:-1] == [*range(asked, asked + len(found) - 1)]
    assert found[-1] == stream.next_sequence - 1
    assert len(found) == 5, "1,000 blocks and a clear in batches of 256, and one without changes"


class Consecutive:
    """A consumer that takes only consecutive numbers from the wanted one up to the one that it heard."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.held = HeldBlocks()

    def join(self, wanted: int, heard: int) -> None:
        numbers = []
        for batch in self.wire.answer(wanted):
            assert batch
            numbers.append(batch.sequence)
            self.held.apply(self.wire.passed(batch))
        assert numbers[: heard - wanted] == [*range(wanted, heard)]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 30), st.integers(50, 100), st.integers(1, 600), st.integers(0, 600))
def test_numbers_from_0_are_consecutive_up_to_the_live_batch(seed: int, history: int, turns: int, wanted: int) -> None:
    wire = Wire(seed, history, 0.0, arrays=False, epoch=0)
    wire.listening = False
    for _ in range(turns):
        wire.keys.change()
    consumer = Consecutive(wire)
    consumer.join(wanted if 0 < wanted < wire.stream.oldest else 0, wire.stream.next_sequence)
    assert {place: found for place, found in consumer.held.places.items() if found} == wire.keys.state()


def test_a_wanted_number_that_is_too_far_back_begins_before_the_history() -> None:
    stream = EventStream(0, lambda: 1.0, 100)
    Keys(stream, 0).grow(1000)
    for _ in range(MOST_FILLED + 10):
        stream.publish(())
    found = numbers(stream, 0)
    assert found[0] == stream.oldest - 16, "1,000 blocks in batches of 256, twice, and 8 to spare"
    assert found[-1] == stream.next_sequence - 1
    assert numbers(stream, 11 + 3)[0] == 14, "as many as can be filled"


def test_a_snapshot_has_numbers_at_once() -> None:
    stream = EventStream(0, lambda: 1.0, 100)
    make_room(stream)
    assert numbers(stream, 0) == [0, stream.next_sequence - 1]


def test_an_interrupted_snapshot_is_never_continued_from_the_history() -> None:
    stream = with_blocks(1000)
    for number in numbers(stream, EPOCH - 50)[:-1]:
        assert stream.resume(number + 1).batches is None


def test_few_numbers_make_large_batches() -> None:
    stream = with_blocks(10_000)
    last = stream.next_sequence - 1
    found = numbers(stream, last - 12)
    assert found[-1] == last
    assert len(found) <= 13


def test_a_state_that_outgrows_its_numbers_ends_the_snapshot() -> None:
    stream = with_blocks(1000)
    stream.publish([Cleared()])  # so that the stream expects nothing
    stream.snapshot = lambda: iter([[stored(at * 256, 256)] for at in range(300)])  # type: ignore[assignment,return-value]
    with pytest.raises(SnapshotOutgrown):
        numbers(stream, stream.next_sequence - 10)


def test_large_blocks_leave_numbers_for_more_batches() -> None:
    stream = EventStream(EPOCH, lambda: 1.0, 10)
    one = stored(0, 100)
    large = Stored(one.place, one.parent, one.keys, [tokens * 400 for tokens in one.tokens], "")
    stream.publish([large])
    stream.snapshot = lambda: iter([[Cleared()], [large]])  # type: ignore[assignment,return-value]
    found = [batch for batch in snapshot(stream, 5) if batch]
    assert max(len(one.changes) for one in found) <= 2
    assert len(found) > 40
    assert Numbering.of(stream, 5).blocks == 256
