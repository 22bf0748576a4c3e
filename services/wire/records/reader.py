"""Reads files of records, as `records.proto` describes them: within bounds, and nothing that it does not know."""

from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from quire.v1 import records_pb2 as pb

# More than any entry has: a Step has 8 MiB at most on its stream.
LARGEST_ENTRY_BYTES = 1 << 26
_LONGEST_LENGTH = 5


class InvalidRecord(Exception):
    """A file is no record, or none that this version reads; the message says which entry is to blame, and why."""


class RecordReader:
    """Reads a file from its header on. Afterwards `end` says why it ends; None: its writer was cut off.

    `entries` counts what was read, `bytes_read` its bytes; with `within_entry` the last of them was cut off.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read the header. Raises InvalidRecord."""
        self._file = file
        self.entries = self.bytes_read = 0
        self.end: str | None = None
        self.within_entry = False
        first = self._next()
        if first is None or first.WhichOneof("kind") != "header":
            raise InvalidRecord("it is no record of Quire: it does not begin with a header")
        self.header = first.header

    def check_version(self, version: int) -> None:
        """Raise InvalidRecord unless the header has this version of its format."""
        if self.header.version != version:
            named = f"format {self.header.format!r}, version {self.header.version}"
            raise self.invalid(f"header says {named}; read here is version {version}")

    @property
    def end_reason(self) -> str:
        """How the record ends, in words."""
        if self.end is not None:
            return self.end
        return f"its writer was cut off in entry {self.entries}" if self.within_entry else "its writer was cut off"

    def __iter__(self) -> Iterator[pb.RecordEntry]:
        """Yield the entries between header and end. Raises InvalidRecord."""
        while (entry := self._next()) is not None:
            if self.end is not None:
                raise self.invalid("it follows the end")
            match entry.WhichOneof("kind"):
                case "end":
                    self.end = entry.end.reason
                case "header":
                    raise self.invalid("header is there again")
                case None:
                    raise self.invalid("it is empty")
                case _:
                    yield entry

    def invalid(self, why: object) -> InvalidRecord:
        """Return the error of the entry that was read last."""
        return InvalidRecord(f"entry {self.entries}: {why}")

    def _next(self) -> pb.RecordEntry | None:
        """Read the next entry; return None where the file ends, be it within one."""
        if (size := self._length()) is None:
            return None
        if size > LARGEST_ENTRY_BYTES:
            raise self.invalid(f"it has {size} bytes, {LARGEST_ENTRY_BYTES} at most")
        data = self._file.read(size)
        self.bytes_read += len(data)
        if self.entries == 1 and size == ord("{") and data.startswith(b'"'):  # as no entry does that has this length
            raise InvalidRecord("it is a record of version 1 (JSON Lines), which this version does not read")
        if len(data) < size:
            self.within_entry = True
            return None
        return self._parsed(data)

    def _length(self) -> int | None:
        """Read how many bytes the next entry has."""
        size = 0
        for place in range(_LONGEST_LENGTH):
            if not (byte := self._file.read(1)):
                self.within_entry = place > 0
                return None
            self.entries += not place
            self.bytes_read += 1
            size |= (byte[0] & 0x7F) << 7 * place
            if byte[0] < 0x80:
                return size
        raise self.invalid("its length does not end")

    def _parsed(self, data: bytes) -> pb.RecordEntry:
        try:
            entry = pb.RecordEntry.FromString(data)
        except DecodeError as error:
            raise self.invalid("it is no entry of a record") from error
        if unknown := _unknown_field(entry):
            raise self.invalid(f"{unknown} is a field that this version does not know")
        return entry


def _unknown_field(message: Message) -> str:
    """Return the path of a field that is not in the contract, by its number at the end; empty where there is none."""
    if len(unknown := UnknownFieldSet(message)):
        return str(unknown[0].field_number)
    for known, value in message.ListFields():
        if known.message_type is not None:
            for one in value if known.is_repeated else (value,):
                if path := _unknown_field(one):
                    return f"{known.name}.{path}"
    return ""
