"""Reads record files, as described in `records.proto`, within bounds; unknown fields are errors."""

from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from quire.v1 import records_pb2 as pb
from services.wire.records.digest import RunningDigest

# Larger than any entry: a block step on its stream has at most 8 MiB.
MAX_ENTRY_BYTES = 1 << 26
_MAX_LENGTH_BYTES = 5
# Of both formats. Entries of version 2 have no digests.
VERSION, WITHOUT_DIGESTS = 3, 2


class InvalidRecord(Exception):
    """The file is not a record that this version can read; the message names the entry and the reason."""


class RecordReader:
    """Reads a file from its header on. `end` is the recorded reason of its end, None if its writer was interrupted.

    `entries` counts the entries and `bytes_read` their bytes. `within_entry` is True if the last entry is incomplete.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read the header. Raises InvalidRecord."""
        self._file = file
        self.entries = self.bytes_read = 0
        self.end: str | None = None
        self.within_entry = False
        self._digest: RunningDigest | None = RunningDigest()
        self._length_bytes = b""
        first = self._next()
        if first is None or first.WhichOneof("kind") != "header":
            raise InvalidRecord("it is not a record of Quire: it does not begin with a header")
        self.header = first.header

    def check_version(self) -> None:
        """Raise InvalidRecord unless this version reads the header's version of its format."""
        if self.header.version not in (WITHOUT_DIGESTS, VERSION):
            named = f"format {self.header.format!r}, version {self.header.version}"
            raise self.invalid(f"header has {named}; this version reads versions {WITHOUT_DIGESTS} and {VERSION}")

    @property
    def end_reason(self) -> str:
        """Reason of the record's end."""
        if self.end is not None:
            return self.end
        return (
            f"its writer was interrupted in entry {self.entries}" if self.within_entry else "its writer was interrupted"
        )

    def __iter__(self) -> Iterator[pb.RecordEntry]:
        """Yield the entries between header and end. Raises InvalidRecord."""
        while (entry := self._next()) is not None:
            if self.end is not None:
                raise self.invalid("it follows the end")
            match entry.WhichOneof("kind"):
                case "end":
                    self.end = entry.end.reason
                case "header":
                    raise self.invalid("it is a second header")
                case None:
                    raise self.invalid("it is empty")
                case _:
                    yield entry

    def invalid(self, why: object) -> InvalidRecord:
        """Return an error that names the last entry read."""
        return InvalidRecord(f"entry {self.entries}: {why}")

    def _next(self) -> pb.RecordEntry | None:
        """Read the next entry; return None at the end of the file, even within an entry."""
        if (size := self._length()) is None:
            return None
        if size > MAX_ENTRY_BYTES:
            raise self.invalid(f"it must have at most {MAX_ENTRY_BYTES} bytes, not {size}")
        data = self._file.read(size)
        self.bytes_read += len(data)
        if self.entries == 1 and size == ord("{") and data.startswith(b'"'):  # no entry of this length begins like that
            raise InvalidRecord("it is a record of version 1 (JSON Lines), which this version does not read")
        if len(data) < size:
            if self._digest and self._is_whole(self._length_bytes + data):
                raise self.invalid(f"it is damaged: its length is {size}")
            self.within_entry = True
            return None
        return self._parsed(data)

    def _is_whole(self, rest: bytes) -> bool:
        """Return True if the rest of the file begins with an entry behind a damaged length, of whatever size."""
        assert self._digest is not None
        return any(self._digest.ends_within(rest[size:]) for size in range(1, _MAX_LENGTH_BYTES + 1))

    def _length(self) -> int | None:
        """Read the length of the next entry."""
        size, self._length_bytes = 0, b""
        for place in range(_MAX_LENGTH_BYTES):
            if not (byte := self._file.read(1)):
                self.within_entry = place > 0
                return None
            self.entries += not place
            self.bytes_read += 1
            self._length_bytes += byte
            size |= (byte[0] & 0x7F) << 7 * place
            if byte[0] < 0x80:
                return size
        raise self.invalid("its length does not end")

    def _parsed(self, data: bytes) -> pb.RecordEntry:
        try:
            entry = pb.RecordEntry.FromString(data)
        except DecodeError as error:
            raise self.invalid("it is not an entry of a record") from error
        if unknown := _unknown_field(entry):
            raise self.invalid(f"{unknown} is unknown to this version")
        if self.entries == 1 and entry.header.version != VERSION:
            self._digest = None  # other versions than these two are refused by their number
        if self._digest is None and entry.digest and (self.entries > 1 or entry.header.version == WITHOUT_DIGESTS):
            raise self.invalid(f"it has a digest, which version {WITHOUT_DIGESTS} does not have")
        if self._digest and not self._digest.accepts(data):
            raise self.invalid("it is damaged: its digest is not the one of its bytes and the entries before it")
        entry.ClearField("digest")
        return entry


def _unknown_field(message: Message) -> str:
    """Return the path of an unknown field, with its number at the end; empty if there is none."""
    if len(unknown := UnknownFieldSet(message)):
        return str(unknown[0].field_number)
    for known, value in message.ListFields():
        if known.message_type is not None:
            for one in value if known.is_repeated else (value,):
                if path := _unknown_field(one):
                    return f"{known.name}.{path}"
    return ""
