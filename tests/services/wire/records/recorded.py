"""Records for tests: written, and replayed."""

import io
import random
from collections.abc import Iterable

from kvmanager import Pool, PoolSpec, report_of
from kvmanager.history.record import OperationsReplay
from quire.v1 import records_pb2 as pb
from services.wire.records.file import EntryEncoder, length_delimited
from services.wire.records.operations import OperationsRecord, begin_replay, run_replay
from services.wire.records.reader import RecordReader
from tests.kvmanager.test_report import random_step

STEPS = 25


def end(reason: str = "the session ended") -> pb.RecordEntry:
    return pb.RecordEntry(end=pb.RecordEnd(reason=reason))


def a_record(seed: int, steps_before: int = 0) -> tuple[list[pb.RecordEntry], Pool]:
    """Record random Steps after `steps_before` others; return the entries and the final pool."""
    draw = random.Random(seed)
    pool = Pool(PoolSpec("engine", 1, "model", 4, 24, 10))
    for number in range(1, steps_before + 1):
        pool.apply(random_step(pool, draw, number))
    record = OperationsRecord(pool.spec)
    entries = [entry for entry in record.begin(report_of(pool)) if entry is not None]
    for number in range(100, 100 + STEPS):
        step = random_step(pool, draw, number)
        entries += record.applied(step, pool.apply(step))
    return [*entries, end()], pool


def content(entries: Iterable[pb.RecordEntry]) -> bytes:
    return b"".join(map(EntryEncoder().encode, entries))


def content_without_digests(entries: Iterable[pb.RecordEntry]) -> bytes:
    """Return a file of version 2."""
    old = [pb.RecordEntry.FromString(one.SerializeToString()) for one in entries]
    old[0].header.version = 2
    for one in old:
        if one.HasField("request"):
            one.request.ClearField("request")
    return b"".join(length_delimited(one.SerializeToString()) for one in old)


def replayed(file: bytes) -> tuple[OperationsReplay, RecordReader]:
    reader = RecordReader(io.BytesIO(file))
    replay = begin_replay(reader)
    for _ in run_replay(reader, replay):
        pass
    return replay, reader
