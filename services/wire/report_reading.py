"""Reads the pages of a report. The engine's side of it is `services.wire.report_writing`."""

from array import array

from kvmanager import KEY_BYTES, InvalidReport, PoolReport, PoolSpec, SequenceReport, TierReport, limits
from quire.v1 import kvmanager_pb2 as pb
from services.wire.kvmanager_codec import short
from services.wire.step_reader import ENTRY_BYTES, only_field
from services.wire.wire_fields import Message, Sliced, numbers, parts

# An engine's pages have some thousand blocks, and no more sequences than have some ten thousand.
_PAGE_BLOCKS = 1 << 15
_PAGE_ENTRIES = 4096
_BLOCK_BYTES = 10
# An engine writes none but the last; a stream of them must come to an end.
_EMPTY_PAGES = 100
_ROWS = 1000

_REPORT = 2  # of PoolRequest
_SEQUENCES, _PINS = 1, 5
_SEQUENCES_BLOCKS, _PINS_BLOCKS = 4, 2
_KEYED, _RELEASED, _WITHHELD, _UNFINDABLE = (2, 3), 4, 6, (13, 14)
_HOST_KEYED, _HOST_RELEASED, _HOST_WITHHELD, _HOST_UNFINDABLE = (7, 8), 9, 10, (15, 16)
_KEYS = (3, 8, 14, 16)
_COLUMNS = dict.fromkeys((2, 4, 6, 7, 9, 10, 13, 15), _PAGE_BLOCKS * _BLOCK_BYTES) | dict.fromkeys(
    _KEYS, _PAGE_BLOCKS * KEY_BYTES
)


class ReportReader:
    """Collects pages until the last one. Raises InvalidReport for more than a pool of this size can have to report."""

    def __init__(self, spec: PoolSpec) -> None:
        self.report = PoolReport()
        self._most_device = spec.device_blocks
        self._most_host = spec.host_blocks
        self._empty_pages = 0
        self._entries_left = spec.device_blocks + spec.host_blocks + limits.MOST_SHARES

    def add(self, data: bytes) -> Sliced[bool]:
        """Take one page in, in slices; return whether it was the last. Raises InvalidField and DecodeError too."""
        message = only_field(data, _REPORT)
        entries = {_SEQUENCES: _PAGE_ENTRIES, _PINS: _PAGE_ENTRIES}
        found = yield from parts(message, pb.ReportPage.DESCRIPTOR, _COLUMNS, entries, ENTRY_BYTES)
        rest = pb.ReportPage.FromString(bytes(found.rest))
        if not rest.last and len(found.rest) == message.end - message.start:
            self._empty_pages += 1
        if self._empty_pages > _EMPTY_PAGES:
            raise InvalidReport(f"more than {_EMPTY_PAGES} pages report nothing")
        for field in found.entries[_SEQUENCES]:
            yield from self._add_sequence(message.of(field, "sequences"))
        for field in found.entries[_PINS]:
            yield from self._add_pin(message.of(field, "pins"))
        yield from self._add_tier("device", found.columns, _KEYED, _UNFINDABLE, _RELEASED, _WITHHELD)
        yield from self._add_tier("host", found.columns, _HOST_KEYED, _HOST_UNFINDABLE, _HOST_RELEASED, _HOST_WITHHELD)
        self.report.resets, self.report.last_step = rest.resets, rest.last_applied_step
        return rest.last

    def _add_sequence(self, message: Message) -> Sliced[None]:
        columns = {_SEQUENCES_BLOCKS: limits.LARGEST_TABLE * _BLOCK_BYTES}
        found = yield from parts(message, pb.SequenceReport.DESCRIPTOR, columns, {}, ENTRY_BYTES)
        blocks = yield from numbers(
            found.columns[_SEQUENCES_BLOCKS], limits.LARGEST_TABLE, "report.sequences.block_ids"
        )
        self._take(len(blocks))
        self.report.sequences.append(_sequence(pb.SequenceReport.FromString(bytes(found.rest)), blocks))
        if len(self.report.sequences) > min(limits.MOST_SEQUENCES, self._most_device + self._most_host):
            most = min(limits.MOST_SEQUENCES, self._most_device + self._most_host)
            raise InvalidReport(f"the report has {len(self.report.sequences)} sequences, {most} at most")
        if not len(self.report.sequences) % 64:
            yield

    def _add_pin(self, message: Message) -> Sliced[None]:
        columns = {_PINS_BLOCKS: limits.LARGEST_TABLE * _BLOCK_BYTES}
        found = yield from parts(message, pb.PinReport.DESCRIPTOR, columns, {}, ENTRY_BYTES)
        blocks = yield from numbers(found.columns[_PINS_BLOCKS], limits.LARGEST_TABLE, "report.pins.block_ids")
        self._take(len(blocks))
        pin_id = pb.PinReport.FromString(bytes(found.rest)).pin_id
        if short(pin_id, limits.LONGEST_PIN_ID, "report.pins.pin_id") in self.report.pins:
            raise InvalidReport(f"pin {pin_id!r} is listed twice")
        self.report.pins[pin_id] = blocks.tolist()
        if len(self.report.pins) > limits.MOST_PINS:
            raise InvalidReport(f"the report has more than {limits.MOST_PINS} pins")
        if not len(self.report.pins) % 64:
            yield

    def _take(self, entries: int) -> None:
        self._entries_left -= entries
        if self._entries_left < 0:
            raise InvalidReport("the report's tables and pins have more entries than a pool may share")

    def _add_tier(
        self,
        name: str,
        columns: dict[int, bytearray],
        keyed: tuple[int, int],
        unfindable: tuple[int, int],
        released: int,
        withheld: int,
    ) -> Sliced[None]:
        tier, most = (
            (self.report.device, self._most_device) if name == "device" else (self.report.host, self._most_host)
        )
        for seals, (blocks, keys) in ((tier.keyed, keyed), (tier.unindexed, unfindable)):
            yield from _add_keys(seals, (yield from _blocks(columns[blocks])), bytes(columns[keys]))
        for listed, blocks in ((tier.release_order, released), (tier.withheld, withheld)):
            listed += yield from _blocks(columns[blocks])
        _check_size(name, tier, most)


def _blocks(column: bytearray) -> "Sliced[array[int]]":
    return (yield from numbers(column, _PAGE_BLOCKS, "report"))


def _check_size(name: str, tier: TierReport, most: int) -> None:
    for entries in (tier.keyed, tier.unindexed, tier.release_order, tier.withheld):
        if len(entries) > most:
            raise InvalidReport(f"the report lists {len(entries)} {name} blocks, but there are {most}")


def _add_keys(keyed: dict[int, bytes], blocks: "array[int]", keys: bytes) -> Sliced[None]:
    if len(keys) != KEY_BYTES * len(blocks):
        raise InvalidReport(f"{len(blocks)} blocks have {len(keys)} bytes of keys, which is not {KEY_BYTES} for each")
    for position, block in enumerate(blocks):
        if block in keyed:
            raise InvalidReport(f"block {block} has two keys")
        keyed[block] = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        if not (position + 1) % _ROWS:
            yield


def _sequence(message: pb.SequenceReport, blocks: "array[int]") -> SequenceReport:
    return SequenceReport(
        sequence=message.sequence,
        group=message.group,
        request_id=short(message.request_id, limits.LONGEST_ID, "report.sequences.request_id"),
        salt=short(message.salt, limits.LONGEST_SALT, "report.sequences.salt"),
        resets=message.resets,
        block_ids=blocks.tolist(),
        prompt_tokens=message.prompt_tokens,
        room_tokens=message.room_tokens,
        computed_tokens=message.computed_tokens,
        committed_blocks=message.committed_blocks,
        swapped=message.swapped,
    )
