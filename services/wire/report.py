"""Reports of a pool, in pages: written by the engine, read by the KV manager within bounds."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import TypeVar

from google.protobuf.descriptor import Descriptor

from blocks import KEY_BYTES
from kvmanager import InvalidReport, PoolReport, PoolSpec, SequenceReport, TierReport, limits
from kvmanager.parts import parts_of
from quire.v1 import kvmanager_pb2 as pb
from services.wire.wire_fields import ENTRY_BYTES, Message, Sliced, check_known, check_length, numbers, parts

_Entry = TypeVar("_Entry")
_Known = TypeVar("_Known", pb.SequenceReport, pb.PinReport)

# Limits of a written page, so that reading it takes well below a millisecond.
_BLOCKS_TOGETHER = 2048
_ENTRIES_TOGETHER = 64
# Limits of a page that is read, above those of any page that an engine writes.
_PAGE_BLOCKS = 1 << 15
_PAGE_ENTRIES = 4096
_BLOCK_BYTES = 10
# Engines write no empty page except the last; the limit ends a stream of them.
_EMPTY_PAGES = 100
_ROWS = 1000

_NUMBERS = {field.name: field.number for field in pb.ReportPage.DESCRIPTOR.fields}
_SEQUENCES, _PINS = _NUMBERS["sequences"], _NUMBERS["pins"]
# Fields of a tier; those of the host tier have the prefix "host_".
_PREFIXES = {"device": "", "host": "host_"}
_KEYED = {"keyed": ("keyed_blocks", "keys"), "unindexed": ("unfindable_blocks", "unfindable_keys")}
_LISTED = {"release_order": "release_order", "withheld": "withheld_blocks", "outlived": "outlived_blocks"}
_COLUMNS = {
    _NUMBERS[prefix + name]: _PAGE_BLOCKS * (KEY_BYTES if name.endswith("keys") else _BLOCK_BYTES)
    for prefix in _PREFIXES.values()
    for name in (*(name for pair in _KEYED.values() for name in pair), *_LISTED.values())
}


def pages_of(report: PoolReport) -> Iterator[pb.ReportPage]:
    """Yield the pages of a report, those of window kinds first; the last one is marked."""
    for number, window in enumerate(report.windows, 1):
        for page in _kind_pages(window):
            page.kind = number
            yield page
    yield from _kind_pages(report)
    yield pb.ReportPage(resets=report.resets, last_applied_step=report.last_step, last=True)


def _kind_pages(report: PoolReport) -> Iterator[pb.ReportPage]:
    for sequences in _small_parts(report.sequences, lambda sequence: len(sequence.block_ids)):
        yield pb.ReportPage(sequences=[pb.SequenceReport(**vars(sequence)) for sequence in sequences])
    for name, prefix in _PREFIXES.items():
        yield from _tier_pages(getattr(report, name), prefix)
    for pins in _small_parts(report.pins.items(), lambda pin: len(pin[1])):
        yield pb.ReportPage(pins=[pb.PinReport(pin_id=pin, block_ids=blocks) for pin, blocks in pins])


def _tier_pages(tier: TierReport, prefix: str) -> Iterator[pb.ReportPage]:
    for name, (blocks_field, keys_field) in _KEYED.items():
        for seals in parts_of(getattr(tier, name).items(), _BLOCKS_TOGETHER):
            page = pb.ReportPage()
            setattr(page, prefix + keys_field, b"".join([key for _, key in seals]))
            getattr(page, prefix + blocks_field).extend([block for block, _ in seals])
            yield page
    for name, blocks_field in _LISTED.items():
        for blocks in parts_of(getattr(tier, name), _BLOCKS_TOGETHER):
            page = pb.ReportPage()
            getattr(page, prefix + blocks_field).extend(blocks)
            yield page


def _small_parts(entries: Iterable[_Entry], blocks_of: Callable[[_Entry], int]) -> Iterator[list[_Entry]]:
    """Split entries into parts that fit a page; an entry with more blocks than a page is a part by itself."""
    part: list[_Entry] = []
    blocks = 0
    for entry in entries:
        if part and (len(part) == _ENTRIES_TOGETHER or blocks + blocks_of(entry) > _BLOCKS_TOGETHER):
            yield part
            part, blocks = [], 0
        part.append(entry)
        blocks += blocks_of(entry)
    if part:
        yield part


class ReportReader:
    """Collects the pages of a report. Raises InvalidReport if it is larger than any report of a pool of this size."""

    def __init__(self, spec: PoolSpec) -> None:
        self.report = PoolReport()
        specs = [spec, *map(spec.of, spec.windows)]
        self._max_blocks = [{"device": one.device_blocks, "host": one.host_blocks} for one in specs]
        self._empty_pages = 0
        self._entries_left = limits.max_table_entries(spec.blocks)

    def add(self, message: Message) -> Sliced[bool]:
        """Add a page, in slices; return True if it was the last. Raises InvalidReport, InvalidField and DecodeError."""
        entries = {_SEQUENCES: _PAGE_ENTRIES, _PINS: _PAGE_ENTRIES}
        found = yield from parts(message, pb.ReportPage.DESCRIPTOR, _COLUMNS, entries, ENTRY_BYTES)
        rest = pb.ReportPage.FromString(bytes(found.rest))
        check_known(rest, "report")
        if not (rest.last or any(found.entries.values()) or any(found.columns.values())):
            self._empty_pages += 1
        if self._empty_pages > _EMPTY_PAGES:
            raise InvalidReport(f"the report has more than {_EMPTY_PAGES} empty pages")
        report = self._of_kind(rest.kind)
        for field in found.entries[_SEQUENCES]:
            yield from self._add_sequence(report, message.of(field, "sequences"))
        for field in found.entries[_PINS]:
            yield from self._add_pin(report, message.of(field, "pins"))
        for name, prefix in _PREFIXES.items():
            yield from self._add_tier(getattr(report, name), (name, rest.kind), found.columns, prefix)
        if rest.last:
            self._end(rest)
        return rest.last

    def _of_kind(self, kind: int) -> PoolReport:
        """Return the report of a kind of blocks."""
        most = len(self._max_blocks) - 1
        if not 0 <= kind <= most:
            raise InvalidReport(f"kind must be between 0 and {most}, not {kind}")
        if kind and not self.report.windows:
            self.report.windows = [PoolReport() for _ in range(most)]
        return self.report.windows[kind - 1] if kind else self.report

    def _end(self, page: pb.ReportPage) -> None:
        for one in (self.report, *self.report.windows):
            one.resets, one.last_step = page.resets, page.last_applied_step

    def _add_sequence(self, report: PoolReport, message: Message) -> Sliced[None]:
        rest, blocks = yield from self._with_blocks(message, pb.SequenceReport.DESCRIPTOR)
        report.sequences.append(_sequence(_known(pb.SequenceReport.FromString(rest), message.path), blocks))
        if len(report.sequences) > limits.MAX_SEQUENCES:
            raise InvalidReport(f"the report must have at most {limits.MAX_SEQUENCES} sequences")
        if not len(report.sequences) % 64:
            yield

    def _add_pin(self, report: PoolReport, message: Message) -> Sliced[None]:
        rest, blocks = yield from self._with_blocks(message, pb.PinReport.DESCRIPTOR)
        pin_id = _known(pb.PinReport.FromString(rest), message.path).pin_id
        if check_length(pin_id, limits.MAX_PIN_ID_LENGTH, "report.pins.pin_id") in report.pins:
            raise InvalidReport(f"pin {pin_id!r} is listed twice")
        report.pins[pin_id] = blocks
        if len(report.pins) > limits.MAX_PINS:
            raise InvalidReport(f"the report must have at most {limits.MAX_PINS} pins")
        if not len(report.pins) % 64:
            yield

    def _with_blocks(self, message: Message, kind: Descriptor) -> Sliced[tuple[bytes, list[int]]]:
        """Read the blocks of a sequence or a pin; return the bytes of the remaining fields, and the blocks."""
        column = kind.fields_by_name["block_ids"].number
        max_bytes = {column: limits.MAX_TABLE_BLOCKS * _BLOCK_BYTES}
        found = yield from parts(message, kind, max_bytes, {}, ENTRY_BYTES)
        blocks = yield from numbers(found.columns[column], limits.MAX_TABLE_BLOCKS, f"{message.path}.block_ids")
        self._entries_left -= len(blocks)
        if self._entries_left < 0:
            raise InvalidReport("the report's tables and pins have more entries than the pool's blocks allow")
        return bytes(found.rest), blocks.tolist()

    def _add_tier(
        self, tier: TierReport, of: tuple[str, int], columns: dict[int, bytearray], prefix: str
    ) -> Sliced[None]:
        name, kind = of
        for keyed, (blocks_field, keys_field) in _KEYED.items():
            blocks = yield from _blocks(columns[_NUMBERS[prefix + blocks_field]])
            yield from _add_keys(getattr(tier, keyed), blocks, bytes(columns[_NUMBERS[prefix + keys_field]]))
        for listed, blocks_field in _LISTED.items():
            getattr(tier, listed).extend((yield from _blocks(columns[_NUMBERS[prefix + blocks_field]])))
        for entries in vars(tier).values():
            if len(entries) > (most := self._max_blocks[kind][name]):
                raise InvalidReport(f"the report lists {len(entries)} {name} blocks, but the pool has {most}")


def _blocks(column: bytearray) -> "Sliced[array[int]]":
    return (yield from numbers(column, _PAGE_BLOCKS, "report"))


def _add_keys(keyed: dict[int, bytes], blocks: "array[int]", keys: bytes) -> Sliced[None]:
    if len(keys) != KEY_BYTES * len(blocks):
        raise InvalidReport(f"keys must have {KEY_BYTES} bytes per block, not {len(keys)} for {len(blocks)} blocks")
    for position, block in enumerate(blocks):
        if block in keyed:
            raise InvalidReport(f"block {block} has two keys")
        keyed[block] = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        if not (position + 1) % _ROWS:
            yield


def _known(message: _Known, path: str) -> _Known:
    check_known(message, path)
    return message


def _sequence(message: pb.SequenceReport, blocks: list[int]) -> SequenceReport:
    check_length(message.request_id, limits.MAX_ID_LENGTH, "report.sequences.request_id")
    check_length(message.salt, limits.MAX_SALT_LENGTH, "report.sequences.salt")
    read = {field.name: getattr(message, field.name) for field in fields(SequenceReport)}
    return SequenceReport(**read | {"block_ids": blocks, "retained": tuple(message.retained)})
