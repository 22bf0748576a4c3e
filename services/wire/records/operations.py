"""Records of operations: the block steps of the KV manager's core as entries of a file, and their replay."""

from collections.abc import Iterator, Sequence

from blocks import Step
from kvmanager import AppliedStep, InvalidRegistration, InvalidReport, PoolReport, PoolSpec, Tier
from kvmanager.history.record import Checksum, OperationsReplay
from kvmanager.parts import complete
from quire.v1 import records_pb2 as pb
from quire.v1.kvmanager_pb2 import ReportPage
from services.runtime.errors import InvalidField
from services.wire.attach import register_message, spec_of
from services.wire.records.file import now
from services.wire.records.reader import VERSION, InvalidRecord, RecordReader
from services.wire.report import ReportReader, pages_of
from services.wire.step import step_of, write_step
from services.wire.wire_fields import Message

OPERATIONS_FORMAT = "quire-operations"
_CONTAINS = "a pool of KV blocks in report form, and every Step of block operations applied to it since"
_SENSITIVE = "contains token ids"


class OperationsRecord:
    """Makes the entries of one session's record: `begin`, then `applied` for each block step in order."""

    def __init__(self, spec: PoolSpec) -> None:
        """Start the record of a pool."""
        self._spec = spec
        self._checksum = Checksum(spec)

    def begin(self, report: PoolReport) -> Iterator[pb.RecordEntry | None]:
        """Yield the header and the snapshot, and None at each pause."""
        header = pb.RecordHeader(
            format=OPERATIONS_FORMAT,
            version=VERSION,
            contains=_CONTAINS,
            sensitive=_SENSITIVE,
            created=now(),
            engine_id=self._spec.engine_id,
            pool=register_message(self._spec),
        )
        yield pb.RecordEntry(header=header)
        yield from self._checksum.adding(report)
        for page in pages_of(report):
            yield pb.RecordEntry(snapshot=page, checksum=self._checksum.digest if page.last else b"")

    def applied(self, step: Step, applied: AppliedStep) -> Iterator[pb.RecordEntry]:
        """Yield the entry of an applied block step."""
        recorded = pb.RecordedStep(
            withheld_blocks=applied.result.withheld_blocks,
            host_withheld_blocks=applied.result.host_withheld_blocks,
        )
        windows = [(one.withheld_blocks, one.host_withheld_blocks) for one in applied.result.windows]
        if any(map(any, windows)):
            recorded.windows.extend(pb.WithheldBlocks(device=device, host=host) for device, host in windows)
        write_step(step, recorded.step)
        self._checksum.add(step, applied)
        yield pb.RecordEntry(step=recorded, checksum=self._checksum.digest)


def begin_replay(reader: RecordReader) -> OperationsReplay:
    """Start the replay of a record. Raises InvalidRecord."""
    reader.check_version()
    try:
        return OperationsReplay(spec_of(reader.header.pool))
    except InvalidRegistration as error:
        raise reader.invalid(f"header.pool: {error}") from error


def run_replay(reader: RecordReader, replay: OperationsReplay) -> Iterator[None]:
    """Replay a record, and pause after each entry.

    Raises ReplayMismatch if a checksum differs from the record's, and InvalidRecord.
    """
    pages, is_complete = ReportReader(replay.spec), False
    try:
        for entry in reader:
            kind = entry.WhichOneof("kind")
            if kind != ("step" if is_complete else "snapshot"):
                raise reader.invalid(f"{kind} is not expected here in a record of operations")
            if is_complete:
                _apply(replay, entry)
            elif is_complete := _is_last(pages, entry.snapshot):
                replay.adopt(pages.report, entry.checksum)
            yield
    except (InvalidField, InvalidReport) as error:
        raise reader.invalid(error) from error
    if not is_complete:
        raise InvalidRecord("it ends before the snapshot of the pool is complete")


def _is_last(pages: ReportReader, page: ReportPage) -> bool:
    """Add a page of the snapshot; return True if it was the last."""
    data = page.SerializeToString()
    return complete(pages.add(Message(data, 0, len(data), "snapshot")))


def _apply(replay: OperationsReplay, entry: pb.RecordEntry) -> None:
    recorded = entry.step
    withheld = [(recorded.withheld_blocks, recorded.host_withheld_blocks)]
    withheld += [(one.device, one.host) for one in recorded.windows]
    kinds = replay.pool.state.kinds
    if len(withheld) > len(kinds):
        raise InvalidField(f"step.windows must be at most {len(kinds) - 1}, not {len(withheld) - 1}", "step.windows")
    for (device, host), kind in zip(withheld, kinds, strict=False):
        _check_blocks(device, kind.device, "withheld_blocks" if kind is kinds[0] else "windows.device")
        _check_blocks(host, kind.host, "host_withheld_blocks" if kind is kinds[0] else "windows.host")
    replay.apply(step_of(recorded.step), withheld, entry.checksum)


def _check_blocks(blocks: Sequence[int], tier: Tier, name: str) -> None:
    for block in blocks:
        if not 1 <= block <= tier.total:
            raise InvalidField(f"step.{name} must be between 1 and {tier.total}, not {block}", f"step.{name}")
