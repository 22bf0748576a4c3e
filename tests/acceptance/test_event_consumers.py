"""What consumers of KV events make of the bytes that vLLM documents, and what an engine must know of them.

Dynamo's indexer is stricter than vLLM's structs; a test that names it shows one of its conditions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.acceptance.documented_events import CLEARED, DocumentedPublisher, Event, batch, raw, removed, stored
from tests.acceptance.event_consumers import Consumer, DynamoIndex, Held, VllmIndex, needs_vllm, until

# The first number of an engine that counts from its start in microseconds since 1970.
EPOCH = 1_795_000_000_000_000
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
Join = Callable[[DocumentedPublisher, type[Any]], Any]


@pytest.fixture
def publisher() -> Iterator[DocumentedPublisher]:
    one = DocumentedPublisher(EPOCH)
    yield one
    one.close()


@pytest.fixture
def join() -> Iterator[Join]:
    """Starts consumers, and stops them at the end."""
    started: list[Consumer] = []

    def start(publisher: DocumentedPublisher, consumer: type[Any]) -> Any:
        started.append(consumer(publisher.pub, publisher.replay))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def dynamo(publisher: DocumentedPublisher, join: Join) -> DynamoIndex:
    """Dynamo's indexer, which has received a first batch."""
    one: DynamoIndex = join(publisher, DynamoIndex)
    arrive(publisher, one)
    return one


consumers = pytest.mark.parametrize("consumer", [pytest.param(VllmIndex, marks=needs_vllm), DynamoIndex])


def gpu(*hashes: int) -> set[Held]:
    return {Held(one, "GPU") for one in hashes}


def arrive(publisher: DocumentedPublisher, consumer: Consumer) -> None:
    """Publish a block until the consumer has it, because a new subscription loses what is sent before it."""
    mark = Held(999_999, "GPU")

    def arrived() -> bool:
        publisher.send(stored([mark.hash], None, [0, 0, 0, 0]))
        return mark in consumer.held()

    until(arrived, "the first batch")
    publisher.send(removed([mark.hash]))
    until(lambda: mark not in consumer.held(), "its removal")


def holds(consumer: Consumer, expected: set[Held]) -> None:
    until(lambda: consumer.held() == expected, f"{expected}, but {consumer.held()}")


def after(publisher: DocumentedPublisher, consumer: Consumer, *events: Event) -> set[Held]:
    """Publish events and then one more block; return what the consumer holds beside that block."""
    publisher.send(*events)
    mark = Held(publisher.next, "GPU")
    publisher.send(stored([mark.hash], None, [9, 9, 9, 9]))
    until(lambda: mark in consumer.held(), "what was published later")
    held = consumer.held() - {mark}
    publisher.send(removed([mark.hash]))
    return held


@consumers
def test_who_joins_late_asks_from_0_and_has_everything(
    publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]
) -> None:
    publisher.send(stored([11, 12], None, PROMPT[:8]), lost=True)
    one = join(publisher, consumer)
    arrive(publisher, one)
    holds(one, gpu(11, 12))
    assert publisher.asked[0] == 0


@consumers
def test_a_heartbeat_reveals_a_lost_batch(publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    publisher.send(stored([11, 12], None, PROMPT[:8]), lost=True)
    missed = publisher.next - 1
    publisher.send()
    holds(one, gpu(11, 12))
    assert publisher.asked[-1] == missed


@consumers
def test_a_snapshot_replaces_what_was_believed(
    publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]
) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    publisher.send(stored([77], None, PROMPT[4:8]))
    holds(one, gpu(77))
    slices = [batch(CLEARED), batch(stored([11, 12], None, PROMPT[:8])), batch(stored([13], 12, PROMPT[8:], "CPU"))]
    publisher.next += 10
    publisher.answers = lambda _: [(publisher.next - 3 + place, one) for place, one in enumerate(slices)]
    publisher.send()
    holds(one, gpu(11, 12) | {Held(13, "CPU")})


@consumers
def test_after_a_restart_with_a_later_epoch_the_state_is_asked_for(join: Join, consumer: type[Consumer]) -> None:
    first = DocumentedPublisher(EPOCH)
    one = join(first, consumer)
    arrive(first, one)
    first.send(stored([11], None, PROMPT[:4]))
    holds(one, gpu(11))
    ports = [int(address.rpartition(":")[2]) for address in (first.pub, first.replay)]
    first.close()
    second = DocumentedPublisher(EPOCH + 10**6, b"", *ports)
    second.answers = lambda _: [(EPOCH + 10**6 - 1, batch(CLEARED, stored([21], None, PROMPT[:4])))]

    def has_new_state() -> bool:
        second.send()
        return bool(one.held() == gpu(21))

    until(has_new_state, "the state of the second process")
    second.close()


@consumers
def test_stored_twice_is_stored_once_and_unknown_blocks_are_removed_without_harm(
    publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]
) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    twice = stored([11, 12], None, PROMPT[:8])
    assert after(publisher, one, removed([5]), twice, twice, removed([5, 6], "CPU")) == gpu(11, 12)
    assert after(publisher, one, removed([12])) == gpu(11)


@consumers
def test_cleared_clears_all_tiers(publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    both = stored([11, 12], None, PROMPT[:8]), stored([12, 13], 11, PROMPT[4:], "CPU")
    assert after(publisher, one, *both) == gpu(11, 12) | {Held(12, "CPU"), Held(13, "CPU")}
    assert after(publisher, one, CLEARED, stored([21], None, PROMPT[:4])) == gpu(21)


@consumers
@pytest.mark.parametrize("highest", [2**63 - 1, 2**63, 2**64 - 1])
def test_hashes_are_unsigned_numbers_of_64_bits(
    publisher: DocumentedPublisher, join: Join, consumer: type[Consumer], highest: int
) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    assert after(publisher, one, stored([highest], None, PROMPT[:4])) == gpu(highest)


@consumers
def test_fields_that_nobody_knows_are_ignored(
    publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]
) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    more: dict[str, Any] = {"group_idx": 0, "locality": "LOCAL", "ownership": None, "session_id": None, "epoch": EPOCH}
    assert after(publisher, one, stored([11], None, PROMPT[:4], **more)) == gpu(11)


def test_dynamo_refuses_a_batch_without_a_rank_and_one_with_more_than_three_members(
    publisher: DocumentedPublisher, dynamo: DynamoIndex
) -> None:
    event = stored([11], None, PROMPT[:4])
    publisher.answers = lambda _: []
    for members in ([1.5, [event]], [1.5, [event], 0, "epoch"]):
        publisher.send_bytes(raw(members))
        assert after(publisher, dynamo) == set()
    publisher.send_bytes(raw([1.5, [event], 0]))
    holds(dynamo, gpu(11))


def test_dynamo_refuses_the_batch_of_an_unknown_event_or_of_hashes_in_bytes(
    publisher: DocumentedPublisher, dynamo: DynamoIndex
) -> None:
    publisher.answers = lambda _: []
    good = stored([11], None, PROMPT[:4])
    for bad in ({"type": "Snapshot"}, stored([bytes(32)], None, PROMPT[:4])):
        assert after(publisher, dynamo, bad, good) == set()


def test_dynamo_knows_no_block_on_the_gpu_whose_parent_is_not_there(
    publisher: DocumentedPublisher, dynamo: DynamoIndex
) -> None:
    parent = stored([11], None, PROMPT[:4], "CPU")
    assert after(publisher, dynamo, parent, stored([12], 11, PROMPT[4:8])) == {Held(11, "CPU")}
    # In the other direction it does: what left the GPU continues a prefix that is there.
    assert after(publisher, dynamo, stored([11], None, PROMPT[:4]), stored([12], 11, PROMPT[4:8], "CPU")) == {
        *gpu(11),
        Held(11, "CPU"),
        Held(12, "CPU"),
    }
    assert dynamo.matched(PROMPT) == {"gpu": 4, "cpu": 8}


def test_dynamo_forgets_what_follows_a_removed_block_until_it_is_stored_again(
    publisher: DocumentedPublisher, dynamo: DynamoIndex
) -> None:
    assert after(publisher, dynamo, stored([11, 12, 13], None, PROMPT), removed([12])) == gpu(11)
    assert after(publisher, dynamo, stored([12], 11, PROMPT[4:8])) == gpu(11, 12)
    assert after(publisher, dynamo, stored([12, 13], 11, PROMPT[4:])) == gpu(11, 12, 13)


def test_dynamo_ignores_windows(publisher: DocumentedPublisher, dynamo: DynamoIndex) -> None:
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 64,
    }
    full = stored([11, 12], None, PROMPT[:8], group_idx=0, kv_cache_spec_kind="full_attention")
    assert after(publisher, dynamo, full, stored([12], 11, PROMPT[4:8], **window)) == gpu(11, 12)
    assert after(publisher, dynamo, removed([12], group_idx=1)) == gpu(11, 12)
    assert after(publisher, dynamo, stored([31], None, PROMPT[:4], group_idx=1)) == gpu(11, 12)


def test_dynamo_drops_a_chain_with_a_block_twice(publisher: DocumentedPublisher, dynamo: DynamoIndex) -> None:
    assert after(publisher, dynamo, stored([11, 11], None, [1, 2, 3, 4] * 2)) == set()
    assert after(publisher, dynamo, stored([11], 11, PROMPT[:4])) == set()


@pytest.mark.parametrize(
    ("salt", "is_known"),
    [
        ({"extra_keys": [["ab" * 32], None]}, False),
        ({"cache_salt": "ab" * 32, "extra_keys": [["ab" * 32], None]}, True),
        ({"extra_keys": [["dynamo-cache-salt:" + "ab" * 32], None]}, True),
    ],
)
def test_dynamo_takes_a_salt_from_a_field_of_its_own(
    publisher: DocumentedPublisher, dynamo: DynamoIndex, salt: dict[str, Any], is_known: bool
) -> None:
    assert after(publisher, dynamo, stored([11, 12], None, PROMPT[:8], **salt)) == gpu(11, 12)
    assert dynamo.matched(PROMPT)["gpu"] == (0 if is_known else 8)
    assert dynamo.matched(PROMPT, cache_salt="ab" * 32)["gpu"] == (8 if is_known else 0)


def test_dynamo_ignores_numbers_that_go_back(publisher: DocumentedPublisher, dynamo: DynamoIndex) -> None:
    later = publisher.next
    publisher.next = 0
    publisher.send(stored([11], None, PROMPT[:4]))
    publisher.next = later
    assert after(publisher, dynamo) == set()


def test_dynamo_indexes_only_blocks_of_the_size_that_it_was_told(
    publisher: DocumentedPublisher, dynamo: DynamoIndex
) -> None:
    assert after(publisher, dynamo, stored([11], None, PROMPT[:8], block_size=8)) == set()


@pytest.mark.parametrize("consumer", [DynamoIndex])  # vLLM's structs of today have maps only
def test_events_in_arrays_are_read_too(publisher: DocumentedPublisher, join: Join, consumer: type[Consumer]) -> None:
    one = join(publisher, consumer)
    arrive(publisher, one)
    short: Event = ["BlockStored", [11, 12], None, PROMPT[:8], 4, None, "GPU", None]
    long: Event = ["BlockStored", [13], 12, PROMPT[8:], 4, None, "GPU", None, [None], 0]
    assert after(publisher, one, short, long) == gpu(11, 12, 13)
    assert after(publisher, one, ["BlockRemoved", [13], "GPU"], ["BlockRemoved", [12], "GPU", 0]) == gpu(11)
    assert after(publisher, one, ["AllBlocksCleared"]) == set()
