"""Writes a report of the engine's pool, a page at a time. The manager's side is `services.wire.report_reading`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvmanager import PoolReport, SequenceReport, TierReport
from quire.v1 import kvmanager_pb2 as pb

_Entry = TypeVar("_Entry")

# Small enough that reading a page delays nobody.
_PAGE_BLOCKS = 2048
_PAGE_ENTRIES = 64


def pages_of(report: PoolReport) -> Iterator[pb.ReportPage]:
    """Yield the pages of a report; the last one says so."""
    for sequences in _small_parts(report.sequences, lambda sequence: len(sequence.block_ids)):
        yield pb.ReportPage(sequences=map(_sequence_message, sequences))
    yield from _device_pages(report.device)
    yield from _host_pages(report.host)
    for pins in _small_parts(report.pins.items(), lambda pin: len(pin[1])):
        yield pb.ReportPage(pins=[pb.PinReport(pin_id=pin, block_ids=blocks) for pin, blocks in pins])
    yield pb.ReportPage(
        resets=report.resets,
        last_applied_step=report.last_step,
        last=True,
    )


def _device_pages(tier: TierReport) -> Iterator[pb.ReportPage]:
    for seals in _parts(tier.keyed.items(), _PAGE_BLOCKS):
        yield pb.ReportPage(keyed_blocks=_blocks(seals), keys=_keys(seals))
    for seals in _parts(tier.unindexed.items(), _PAGE_BLOCKS):
        yield pb.ReportPage(unfindable_blocks=_blocks(seals), unfindable_keys=_keys(seals))
    for blocks in _parts(tier.release_order, _PAGE_BLOCKS):
        yield pb.ReportPage(release_order=blocks)
    for blocks in _parts(tier.withheld, _PAGE_BLOCKS):
        yield pb.ReportPage(withheld_blocks=blocks)


def _host_pages(tier: TierReport) -> Iterator[pb.ReportPage]:
    for seals in _parts(tier.keyed.items(), _PAGE_BLOCKS):
        yield pb.ReportPage(host_keyed_blocks=_blocks(seals), host_keys=_keys(seals))
    for seals in _parts(tier.unindexed.items(), _PAGE_BLOCKS):
        yield pb.ReportPage(host_unfindable_blocks=_blocks(seals), host_unfindable_keys=_keys(seals))
    for blocks in _parts(tier.release_order, _PAGE_BLOCKS):
        yield pb.ReportPage(host_release_order=blocks)
    for blocks in _parts(tier.withheld, _PAGE_BLOCKS):
        yield pb.ReportPage(host_withheld_blocks=blocks)


def _parts(entries: Iterable[_Entry], size: int) -> Iterator[list[_Entry]]:
    iterator = iter(entries)
    while part := list(islice(iterator, size)):
        yield part


def _small_parts(entries: Iterable[_Entry], blocks_of: Callable[[_Entry], int]) -> Iterator[list[_Entry]]:
    """Yield entries in parts of some, with no more blocks than a page may have unless it is one entry."""
    part: list[_Entry] = []
    blocks = 0
    for entry in entries:
        if part and (len(part) == _PAGE_ENTRIES or blocks + blocks_of(entry) > _PAGE_BLOCKS):
            yield part
            part, blocks = [], 0
        part.append(entry)
        blocks += blocks_of(entry)
    if part:
        yield part


def _blocks(seals: Sequence[tuple[int, bytes]]) -> list[int]:
    return [block for block, _ in seals]


def _keys(seals: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(key for _, key in seals)


def _sequence_message(report: SequenceReport) -> pb.SequenceReport:
    return pb.SequenceReport(
        sequence=report.sequence,
        group=report.group,
        request_id=report.request_id,
        salt=report.salt,
        resets=report.resets,
        block_ids=report.block_ids,
        prompt_tokens=report.prompt_tokens,
        room_tokens=report.room_tokens,
        computed_tokens=report.computed_tokens,
        committed_blocks=report.committed_blocks,
        swapped=report.swapped,
    )
