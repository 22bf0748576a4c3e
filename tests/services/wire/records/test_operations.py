"""Records of operations: their replay, and the reasons why invalid ones are refused."""

from collections.abc import Callable

import pytest

from kvmanager import Pool, PoolSpec, report_of
from quire.v1 import kvmanager_pb2, records_pb2
from services.wire.attach import spec_of
from services.wire.records.file import length_delimited
from services.wire.records.operations import OperationsRecord
from services.wire.records.reader import MAX_ENTRY_BYTES, InvalidRecord
from tests.services.wire.records.recorded import STEPS, a_record, content, end, replayed

Entry = records_pb2.RecordEntry


@pytest.mark.parametrize("steps_before", [0, 15])
@pytest.mark.parametrize("seed", range(5))
def test_a_record_is_replayed_to_its_final_pool_and_checksum(seed: int, steps_before: int) -> None:
    entries, pool = a_record(seed, steps_before)
    replay, reader = replayed(content(entries))
    assert (replay.steps, reader.end, reader.entries) == (STEPS, "the session ended", len(entries))
    assert replay.checksum == entries[-2].checksum.hex()
    assert report_of(replay.pool) == report_of(pool)


def test_the_header_describes_the_record() -> None:
    header = a_record(1)[0][0].header
    assert (header.format, header.version) == ("quire-operations", 3)
    assert header.sensitive == "contains token ids"
    assert "every Step of block operations" in header.contains
    assert spec_of(header.pool) == PoolSpec("engine", 1, "model", 4, 24, 10)
    assert header.engine_id == "engine"


def test_a_large_snapshot_is_written_in_short_entries_with_pauses() -> None:
    pool = Pool(PoolSpec("engine", 1, "model", 4, 50_000))
    made = list(OperationsRecord(pool.spec).begin(report_of(pool)))
    entries = [entry for entry in made if entry is not None]
    assert max(entry.ByteSize() for entry in entries) < 10_000
    assert made.count(None) > 50
    replay, reader = replayed(content(entries))
    assert report_of(replay.pool) == report_of(pool)
    assert (reader.end, reader.end_reason) == (None, "its writer was interrupted")


def test_an_interrupted_record_is_replayed_to_its_last_complete_entry() -> None:
    entries, _ = a_record(1)
    file, whole = content(entries[:-2]), content(entries[:-1])
    last = whole[len(file) :]
    for cut in (1, 2, 3, len(last) // 2, len(last) - 1):
        replay, reader = replayed(file + last[:cut])
        assert (replay.steps, reader.end) == (STEPS - 1, None)
        assert reader.end_reason == f"its writer was interrupted in entry {len(entries) - 1}"


def a_step(**fields: object) -> Entry:
    return Entry(step=records_pb2.RecordedStep(step=kvmanager_pb2.Step(step=999, **fields)))  # type: ignore[arg-type]


def with_unknown_field(entries: list[Entry]) -> bytes:
    """Add field 99 to the last Step, as a later version might."""
    last = entries[-2]
    step = kvmanager_pb2.Step.FromString(last.step.step.SerializeToString() + b"\x98\x06\x01")
    return content([*entries[:-2], Entry(step=records_pb2.RecordedStep(step=step), checksum=last.checksum)])


def of_version(version: int) -> Callable[[list[Entry]], bytes]:
    def changed(entries: list[Entry]) -> bytes:
        entries[0].header.version = version
        return content(entries)

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", "not a record of Quire"),
        (lambda _: b"nothing\n", "not a record of Quire"),
        (lambda entries: content(entries[1:]), "it does not begin with a header"),
        (
            lambda _: b'{"format":"quire-operations","version":1}\n',
            "version 1 (JSON Lines), which this version",
        ),
        (lambda _: b'{"contains":"a pool of KV blocks in report form"' + bytes(500), "version 1 (JSON Lines)"),
        (
            of_version(1),
            "entry 1: header has format 'quire-operations', version 1; this version reads versions 2 and 3",
        ),
        (of_version(4), "version 4; this version reads versions 2 and 3"),
        (of_version(2), "entry 1: it has a digest, which version 2 does not have"),
        (lambda entries: content(entries[:1]), "it ends before the snapshot of the pool is complete"),
        (lambda entries: content([entries[0], end()]), "it ends before the snapshot of the pool is complete"),
        (lambda entries: content([entries[0], *entries]), "entry 2: it is a second header"),
        (lambda entries: content([entries[0], a_step()]), "entry 2: step is not expected here"),
        (lambda entries: content([*entries[:-1], entries[1]]), "snapshot is not expected here"),
        (lambda entries: content([*entries, end()]), "it follows the end"),
        (lambda entries: content(entries) + b"\x00", "it is damaged"),
        (lambda entries: content(entries) + b"\x05garbage", "it is not an entry of a record"),
        (lambda entries: content([*entries[:-1], Entry()]), "it is empty"),
        (lambda entries: content(entries[:-1]) + b"\xff" * 6, "its length does not end"),
        (lambda entries: content(entries[:-1]) + b"\xff\xff\xff\xff\x0f", f"must have at most {MAX_ENTRY_BYTES} bytes"),
        (with_unknown_field, "step.step.99 is unknown to this version"),
        (lambda entries: content(entries[:-1]) + length_delimited(b""), "it is damaged: its digest is not the one"),
        (lambda entries: content(entries[:3]) + content(entries)[len(content(entries[:4])) :], "it is damaged"),
        (lambda entries: content([*entries[:-1], a_step(pins=[kvmanager_pb2.PinChange()])]), "step.pins has an empty"),
        (
            lambda entries: content([*entries[:-1], a_step(length_sequences=[1])]),
            "step.lengths: the arrays differ in length",
        ),
        (
            lambda entries: content([*entries[:-1], Entry(step=records_pb2.RecordedStep(withheld_blocks=[1, 25]))]),
            "step.withheld_blocks must be between 1 and 24, not 25",
        ),
    ],
)
def test_an_invalid_record_is_refused_with_the_entry_and_the_reason(
    change: Callable[[list[Entry]], bytes], reason: str
) -> None:
    entries, _ = a_record(1)
    with pytest.raises(InvalidRecord) as refused:
        replayed(change(entries))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_snapshot_of_another_pool_is_refused() -> None:
    entries, _ = a_record(1)
    entries[0].header.pool.block_size = 0
    with pytest.raises(InvalidRecord, match=r"entry 1: header\.pool: block_size must be at least 1, not 0"):
        replayed(content(entries))
