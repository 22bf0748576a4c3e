"""Reads protobuf's wire format in slices and within bounds, before any object is made.

A field of one byte takes tens of bytes in protobuf's parser, and over a hundred as Python values. So large messages
are split here: their fields are counted, then parsed in pieces. Every generator function pauses within a millisecond.
"""

from array import array
from collections.abc import Collection, Generator, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField

# Fields walked, and bytes of packed numbers decoded, without a pause: about half a millisecond.
_FIELDS = 250
_CHUNK_BYTES = 8192
# Maximum fields of a message; engines pack their numbers and stay far below.
_MAX_FIELDS = 1 << 17
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}

# Maximum bytes of a list entry without its tokens: ids, a salt, numbers.
ENTRY_BYTES = 4096

_Result = TypeVar("_Result")
_Text = TypeVar("_Text", str, bytes)
# A generator that pauses, and its result.
Sliced = Generator[None, None, _Result]


class Field(NamedTuple):
    """A field: `begin` is the offset of its tag, `start` that of its value, and `end` is the end of both."""

    number: int
    wire_type: int
    begin: int
    start: int
    end: int


class Message(NamedTuple):
    """A message within `data`, and its path for error messages."""

    data: bytes
    start: int
    end: int
    path: str

    def of(self, field: Field, name: str) -> "Message":
        """Return the message that is a field's value."""
        return Message(self.data, field.start, field.end, f"{self.path}.{name}" if self.path else name)


def root_message(data: bytes) -> Message:
    """Return bytes as a message without path."""
    return Message(data, 0, len(data), "")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number; return it and the offset after it. Raises DecodeError."""
    value = shift = 0
    for place in range(at, min(end, at + 10)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise DecodeError("Error parsing message: a number does not end")


def field_at(message: Message, at: int) -> Field:
    """Return the field at an offset. Raises DecodeError if there is none."""
    data, end = message.data, message.end
    tag, start = _varint(data, at, end)
    wire_type = tag & 7
    if wire_type == _BYTES:
        size, start = _varint(data, start, end)
        stop = start + size
    elif wire_type == _VARINT:
        _, stop = _varint(data, start, end)
    else:
        stop = start + _FIXED.get(wire_type, end)  # groups are not part of the contract
    if not tag >> 3 or stop > end:
        raise DecodeError("Error parsing message: a field does not end where its message does")
    return Field(tag >> 3, wire_type, at, start, stop)


def walk(message: Message) -> Generator[Field | None, None, None]:
    """Yield a message's fields, and None at each pause. Raises DecodeError, and InvalidField for too many fields."""
    at, done = message.start, 0
    while at < message.end:
        field = field_at(message, at)
        yield field
        at = field.end
        done += 1
        if done > _MAX_FIELDS:
            raise InvalidField(f"{message.path} must have at most {_MAX_FIELDS} fields", message.path)
        if not done % _FIELDS:
            yield None


class Parts(NamedTuple):
    """Fields of a message: packed columns by number, submessages by number, and the bytes of all others."""

    columns: dict[int, bytearray]
    entries: dict[int, list[Field]]
    rest: bytearray


def parts(
    message: Message, kind: Descriptor, columns: Mapping[int, int], entries: Mapping[int, int], rest_bytes: int
) -> Sliced[Parts]:
    """Split a message into its fields. Raises DecodeError, and InvalidField as soon as a limit is exceeded.

    `columns` are numbers of repeated number fields, packed or not, or of bytes, with their maximum bytes; `entries` are
    numbers of submessages, with their maximum count. All other fields together may have `rest_bytes`.
    """
    found = Parts({number: bytearray() for number in columns}, {number: [] for number in entries}, bytearray())
    for field in walk(message):
        if field is None:
            yield
        elif field.number in columns and field.wire_type in (_BYTES, _VARINT):
            column = found.columns[field.number]
            if len(column) + field.end - field.start > columns[field.number]:
                raise _too_much(message, kind, field, f"must have at most {columns[field.number]} bytes")
            column += message.data[field.start : field.end]
        elif field.number in entries and field.wire_type == _BYTES:
            found.entries[field.number].append(field)
            if len(found.entries[field.number]) > entries[field.number]:
                raise _too_much(message, kind, field, f"must have at most {entries[field.number]} entries")
        else:
            if len(found.rest) + field.end - field.begin > rest_bytes:
                raise _too_much(message, kind, field, f"is too large: these fields have at most {rest_bytes} bytes")
            found.rest.extend(message.data[field.begin : field.end])
    return found


def _too_much(message: Message, kind: Descriptor, field: Field, what: str) -> InvalidField:
    known = kind.fields_by_number.get(field.number)
    path = f"{message.path}.{known.name if known else field.number}"
    return InvalidField(f"{path} {what}", path)


def numbers(column: bytearray, maximum: int, field: str, *, wide: bool = False) -> "Sliced[array[int]]":
    """Decode a packed column of 32-bit numbers, or 64-bit if `wide`. Raises InvalidField for more than `most`."""
    decoded = array("q" if wide else "i")
    start = 0
    while start < len(column):
        if start:
            yield
        end = min(start + _CHUNK_BYTES, len(column))
        while end > start and column[end - 1] > 0x7F:  # inside a number
            end -= 1
        decoded.extend(_chunk(bytes(column[start:end]), wide=wide))
        start = end if end > start else len(column) + 1
        if len(decoded) > maximum:
            raise InvalidField(f"{field} must have at most {maximum} entries", field)
    if start > len(column):
        raise DecodeError("Error parsing message: a number does not end")
    return decoded


def _chunk(packed: bytes, *, wide: bool) -> Collection[int]:
    """Decode packed numbers by parsing them as any packed field of their type."""
    message = b"\x22" + _length(len(packed)) + packed
    if wide:
        return pb.Step.FromString(b"\x32" + message[1:]).swap_outs[:]
    return pb.Commits.FromString(message).token_ids[:]


def _length(size: int) -> bytes:
    return bytes((size & 0x7F | 0x80, size >> 7)) if size > 0x7F else bytes((size,))


def batches(message: Message, fields: list[Field], max_fields: int, max_bytes: int) -> Generator[bytes, None, None]:
    """Join the bytes of fields into batches within both limits; a field above them is a batch by itself."""
    batch: list[bytes] = []
    size = 0
    for field in fields:
        if batch and (len(batch) >= max_fields or size + field.end - field.begin > max_bytes):
            yield b"".join(batch)
            batch, size = [], 0
        batch.append(message.data[field.begin : field.end])
        size += field.end - field.begin
    if batch:
        yield b"".join(batch)


def check_known(message: ProtobufMessage, path: str) -> None:
    """Raise InvalidField for a field that this version does not know, in a message or in the messages in it.

    To ignore it would change what the sender means. An engine sends only fields that the manager lists in Registered.
    """
    if unknown := UnknownFieldSet(message):
        number = unknown[0].field_number
        raise InvalidField(f"{path} has field {number}, which this version does not know", path)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else (value,):
                check_known(one, f"{path}.{field.name}")


def check_length(value: _Text, maximum: int, field: str) -> _Text:
    """Return an id or a salt. Raises InvalidField if it is too long."""
    if len(value) > maximum:
        raise InvalidField(f"{field} must have at most {maximum} characters, not {len(value)}", field)
    return value
