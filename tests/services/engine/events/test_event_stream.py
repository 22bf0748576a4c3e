"""The stream of KV events: numbers, pieces, bounds of its history, and its heartbeat."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.events.changes import Cleared, KeyChange, Removed, Stored
from services.engine.events.event_stream import MOST_BLOCKS, EventBatch, EventStream, beat, pieces, sliced
from tests.key_changes import PLACES, key, removed, stored, tokens

EPOCH = 1_000


def stream(history: int = 100, history_blocks: int = 1 << 17) -> EventStream:
    return EventStream(EPOCH, lambda: 5.0, history, history_blocks)


changes = st.lists(
    st.one_of(
        st.integers(1, 700).map(lambda count: stored(0, count, parent=9, salt="s")),
        st.integers(1, 700).map(lambda count: removed(*range(count))),
        st.just(Cleared()),
    ),
    max_size=6,
)


def flat(parts: Sequence[Sequence[KeyChange]]) -> list[tuple[object, ...]]:
    """One tuple for each key."""
    found: list[tuple[object, ...]] = []
    for change in (one for part in parts for one in part):
        if isinstance(change, Stored):
            parents = [change.parent, *change.keys[:-1]]
            found += [("stored", *one) for one in zip(parents, change.keys, change.tokens, strict=True)]
        else:
            found += [("removed", one) for one in change.keys] if isinstance(change, Removed) else [("cleared",)]
    return found


@given(changes)
def test_parts_have_the_same_keys_with_the_same_parents_in_the_same_order(many: list[KeyChange]) -> None:
    parts = [*sliced(many)]
    assert flat(parts) == flat([many])
    assert all(sum(len(getattr(one, "keys", "1")) for one in part) <= MOST_BLOCKS for part in parts)
    assert bool(parts[0]) == bool(many)


def test_large_blocks_make_small_parts() -> None:
    change = Stored(PLACES[0], None, [*map(key, range(8))], [tokens(one, 1600) for one in range(8)], "")
    assert [len(one.keys) for one in pieces(change, MOST_BLOCKS) if isinstance(one, Stored)] == [2, 2, 2, 2]


def test_a_block_larger_than_a_part_is_a_part() -> None:
    change = Stored(PLACES[0], None, [key(1), key(2)], [tokens(1, 5000), tokens(2, 5000)], "")
    assert [len(part) for part in sliced([change])] == [1, 1]


def test_numbers_rise_by_one_from_the_epoch() -> None:
    one, heard = stream(), list[EventBatch]()
    end = one.listen(heard.append)
    one.publish([stored(0, 300)])
    one.publish([])
    end()
    one.publish([Cleared()])
    assert [(batch.sequence, len(batch.changes)) for batch in heard] == [(1000, 1), (1001, 1), (1002, 0)]
    assert one.next_sequence == 1004


def test_a_listener_resumes_within_the_history_and_no_further() -> None:
    one = stream(history=3)
    for number in range(5):
        one.publish([stored(number, 1)])
    assert [batch.sequence for batch in one.resume(1002).batches or ()] == [1002, 1003, 1004]
    assert one.resume(1005).batches == []
    for first in (0, 999, 1001, 1006):
        assert one.resume(first).batches is None, first


def test_the_history_is_bounded_in_blocks() -> None:
    one = stream(history_blocks=10)
    for number in range(5):
        one.publish([stored(4 * number, 4)])
    assert one.oldest == 1003
    one.publish([stored(100, 11)])
    assert one.oldest == 1005, "the last batch stays"
    assert one.stats.history_batches == 1


def test_announced_blocks_are_those_stored_and_not_removed() -> None:
    one = stream()
    one.publish([stored(0, 5), removed(4, 3)])
    assert one.announced_blocks == 3
    assert (one.stats.batches, one.stats.stored_blocks, one.stats.removed_blocks) == (1, 5, 2)
    one.publish([Cleared()])
    assert (one.announced_blocks, one.stats.clears) == (0, 1)


def test_the_age_of_the_history_is_that_of_its_oldest_batch() -> None:
    times = iter([10.0, 20.0, 31.5])
    one = EventStream(EPOCH, lambda: next(times), 10)
    one.publish([])
    one.publish([])
    assert one.stats.history_seconds == 21.5


@pytest.mark.anyio
async def test_an_idle_stream_beats_and_a_busy_one_does_not() -> None:
    one = stream()
    beating = asyncio.create_task(beat(one, 0.02))
    heard: asyncio.Queue[EventBatch] = asyncio.Queue()
    one.listen(heard.put_nowait)
    assert (await asyncio.wait_for(heard.get(), 5)).changes == []
    for _ in range(20):
        one.publish([stored(0, 1)])
        assert (await heard.get()).changes, "no heartbeat came between two batches"
        await asyncio.sleep(0.001)
    beating.cancel()
