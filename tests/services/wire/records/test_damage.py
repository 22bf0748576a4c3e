"""A byte changed anywhere in a record is found, with its entry."""

import io
import random
from collections.abc import Callable

import pytest

from engine.run.record import RecordedRequest, RecordSettings
from kvmanager.history.record import ReplayMismatch
from services.wire.records.reader import InvalidRecord, RecordReader
from services.wire.records.requests import header_entry, request_entry, requests_of, settings_of
from tests.services.wire.records.recorded import a_record, content, content_without_digests, end, replayed

REQUESTS = [
    RecordedRequest(number, 2 * number, 9, tuple(range(number % 40)), 100 + number, 60, 80, "greedy", 0, "stop", number)
    for number in range(40)
]
ENTRIES = [header_entry(RecordSettings(4, 64, 32, 8), "engine"), *map(request_entry, REQUESTS), end("it stopped")]


def read_requests(file: bytes) -> None:
    reader = RecordReader(io.BytesIO(file))
    settings_of(reader)
    assert list(requests_of(reader)) == REQUESTS


def replay_operations(file: bytes) -> None:
    replayed(file)


KINDS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "requests": (content(ENTRIES), read_requests),
    "operations": (content(a_record(1)[0]), replay_operations),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_change_of_a_byte_is_refused(kind: str) -> None:
    file, read = KINDS[kind]
    read(file)
    draw = random.Random(3)
    places = [*range(60), *range(len(file) - 60, len(file)), *(draw.randrange(len(file)) for _ in range(400))]
    for place in places:
        damaged = bytearray(file)
        damaged[place] ^= draw.randrange(1, 256)
        with pytest.raises((InvalidRecord, ReplayMismatch)):
            read(bytes(damaged))


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_are_missing_repeated_or_exchanged_are_refused(kind: str) -> None:
    entries = ENTRIES if kind == "requests" else a_record(1)[0]
    parts = [content(entries[: at + 1])[len(content(entries[:at])) :] for at in range(len(entries))]
    _, read = KINDS[kind]
    for changed in (
        [*parts[:5], *parts[6:]],
        [*parts[:5], parts[4], *parts[5:]],
        [*parts[:4], parts[5], parts[4], *parts[6:]],
    ):
        with pytest.raises(InvalidRecord, match=r"entry [56]: it is damaged: its digest"):
            read(b"".join(changed))


def test_damage_is_named_by_its_entry() -> None:
    file = bytearray(content(ENTRIES))
    place = len(content(ENTRIES[:7])) + 4
    file[place] ^= 1
    with pytest.raises(InvalidRecord, match="entry 8: "):
        read_requests(bytes(file))


def test_a_length_beyond_the_file_is_damage_and_no_interruption() -> None:
    file = bytearray(content(ENTRIES))
    file[len(content(ENTRIES[:-2])) + 1] = 0x7F
    with pytest.raises(InvalidRecord, match=r"entry 41: it is damaged: its length is 16\d+"):
        read_requests(bytes(file))


def test_a_record_of_version_2_is_read_without_digests() -> None:
    reader = RecordReader(io.BytesIO(content_without_digests(ENTRIES)))
    settings_of(reader)
    assert [one.number for one in requests_of(reader)] == [one.number for one in REQUESTS]
    assert replayed(content_without_digests(a_record(1)[0]))[1].end == "the session ended"
