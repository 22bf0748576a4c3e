"""Protobuf's wire format, walked a little at a time and within bounds, before anything becomes an object.

A field of one byte becomes tens of bytes in protobuf's parser, and a hundred and more as Python values, all in one go.
So large messages are taken apart here: their fields are found and counted, and parsed in pieces. Each function that is
a generator pauses within a millisecond.
"""

from array import array
from collections.abc import Collection, Generator, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField

# Fields that are walked without a pause, and bytes of packed numbers that are decoded: about half a millisecond.
_FIELDS = 250
_CHUNK_BYTES = 8192
# Fields of one message: what has more was not written by an engine, which packs its numbers.
_MOST_FIELDS = 1 << 17
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}

# An entry of a list beside its tokens: ids, a salt, numbers.
ENTRY_BYTES = 4096

_Result = TypeVar("_Result")
_Text = TypeVar("_Text", str, bytes)
# A generator that pauses, and what it comes to.
Sliced = Generator[None, None, _Result]


class Field(NamedTuple):
    """A field: its bytes begin at `begin`, those of its value at `start`, and both end before `end`."""

    number: int
    wire_type: int
    begin: int
    start: int
    end: int


class Message(NamedTuple):
    """The part of `data` that is a message, and its path for those who read of its faults."""

    data: bytes
    start: int
    end: int
    path: str

    def of(self, field: Field, name: str) -> "Message":
        """Return the message that is a field's value."""
        return Message(self.data, field.start, field.end, f"{self.path}.{name}" if self.path else name)


def whole(data: bytes) -> Message:
    """Return all of some bytes as a message."""
    return Message(data, 0, len(data), "")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number; return it and where it ends. Raises DecodeError."""
    value = shift = 0
    for place in range(at, min(end, at + 10)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise DecodeError("Error parsing message: a number does not end")


def field_at(message: Message, at: int) -> Field:
    """Return the field that begins at a place of a message. Raises DecodeError where there is none."""
    data, end = message.data, message.end
    tag, start = _varint(data, at, end)
    wire_type = tag & 7
    if wire_type == _BYTES:
        size, start = _varint(data, start, end)
        stop = start + size
    elif wire_type == _VARINT:
        _, stop = _varint(data, start, end)
    else:
        stop = start + _FIXED.get(wire_type, end)  # groups have no place in this contract
    if not tag >> 3 or stop > end:
        raise DecodeError("Error parsing message: a field does not end where its message does")
    return Field(tag >> 3, wire_type, at, start, stop)


def walk(message: Message) -> Generator[Field | None, None, None]:
    """Yield a message's fields, and None at each pause. Raises DecodeError, and InvalidField for far too many."""
    at, done = message.start, 0
    while at < message.end:
        field = field_at(message, at)
        yield field
        at = field.end
        done += 1
        if done > _MOST_FIELDS:
            raise InvalidField(f"{message.path} has more than {_MOST_FIELDS} fields", message.path)
        if not done % _FIELDS:
            yield None


class Parts(NamedTuple):
    """A message taken apart: its packed columns by number, the fields that are messages, and the bytes of the rest."""

    columns: dict[int, bytearray]
    entries: dict[int, list[Field]]
    rest: bytearray


def parts(
    message: Message, kind: Descriptor, columns: Mapping[int, int], entries: Mapping[int, int], rest_bytes: int
) -> Sliced[Parts]:
    """Take a message apart. Raises InvalidField for more than is allowed, as soon as that is passed, and DecodeError.

    By their numbers: `columns` are repeated numbers, packed or not, or bytes, and the most bytes that their values may
    have; `entries` are messages, and how many there may be. All else together may have `rest_bytes`.
    """
    found = Parts({number: bytearray() for number in columns}, {number: [] for number in entries}, bytearray())
    for field in walk(message):
        if field is None:
            yield
        elif field.number in columns and field.wire_type in (_BYTES, _VARINT):
            column = found.columns[field.number]
            if len(column) + field.end - field.start > columns[field.number]:
                raise _too_much(message, kind, field, "more than it can have to say")
            column += message.data[field.start : field.end]
        elif field.number in entries and field.wire_type == _BYTES:
            found.entries[field.number].append(field)
            if len(found.entries[field.number]) > entries[field.number]:
                raise _too_much(message, kind, field, f"more than {entries[field.number]} entries")
        else:
            if len(found.rest) + field.end - field.begin > rest_bytes:
                raise _too_much(message, kind, field, f"too much: these fields have {rest_bytes} bytes at most")
            found.rest.extend(message.data[field.begin : field.end])
    return found


def _too_much(message: Message, kind: Descriptor, field: Field, what: str) -> InvalidField:
    known = kind.fields_by_number.get(field.number)
    path = f"{message.path}.{known.name if known else field.number}"
    return InvalidField(f"{path} has {what}", path)


def numbers(column: bytearray, most: int, field: str, *, wide: bool = False) -> "Sliced[array[int]]":
    """Decode a packed column of 32-bit numbers, or `wide` ones of 64. Raises InvalidField for more than `most`."""
    decoded = array("q" if wide else "i")
    start = 0
    while start < len(column):
        if start:
            yield
        end = min(start + _CHUNK_BYTES, len(column))
        while end > start and column[end - 1] > 0x7F:  # within a number
            end -= 1
        decoded.extend(_chunk(bytes(column[start:end]), wide=wide))
        start = end if end > start else len(column) + 1
        if len(decoded) > most:
            raise InvalidField(f"{field} has more than {most} entries", field)
    if start > len(column):
        raise DecodeError("Error parsing message: a number does not end")
    return decoded


def _chunk(packed: bytes, *, wide: bool) -> Collection[int]:
    """Let protobuf decode packed numbers: any field of their type will do."""
    message = b"\x22" + _length(len(packed)) + packed
    if wide:
        return pb.Step.FromString(b"\x32" + message[1:]).swap_outs[:]
    return pb.Commits.FromString(message).token_ids[:]


def _length(size: int) -> bytes:
    return bytes((size & 0x7F | 0x80, size >> 7)) if size > 0x7F else bytes((size,))


def batches(message: Message, fields: list[Field], most_fields: int, most_bytes: int) -> Generator[bytes, None, None]:
    """Yield the bytes of fields, so many of them together at most, and so many bytes unless it is one."""
    batch: list[bytes] = []
    size = 0
    for field in fields:
        if batch and (len(batch) >= most_fields or size + field.end - field.begin > most_bytes):
            yield b"".join(batch)
            batch, size = [], 0
        batch.append(message.data[field.begin : field.end])
        size += field.end - field.begin
    if batch:
        yield b"".join(batch)


def short(value: _Text, most: int, field: str) -> _Text:
    """Return an id or a salt. Raises InvalidField for one that is longer than any gateway makes them."""
    if len(value) > most:
        raise InvalidField(f"{field} has {len(value)} characters, {most} at most", field)
    return value
