"""`quire replay --print`: a record for people to read, one line for each entry."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.wire.records.reader import RecordReader

# Numbers shown of a list; of tokens only the count is shown.
_MOST_NUMBERS = 16
_TOKENS = "token_ids"


def lines(reader: RecordReader) -> Iterator[str]:
    """Yield a line for the header, then one for each entry. Raises InvalidRecord."""
    yield f"1 header {_fields(reader.header)}"
    for entry in reader:
        kind = entry.WhichOneof("kind")
        checksum = f" checksum={entry.checksum.hex()}" if entry.checksum else ""
        yield f"{reader.entries} {kind} {_fields(getattr(entry, str(kind)))}{checksum}"
    yield f"The record ends: {reader.end_reason}."


def _fields(message: Message) -> str:
    return " ".join(_field(known, value) for known, value in message.ListFields())


def _field(known: FieldDescriptor, value: Any) -> str:
    if not known.is_repeated:
        return f"{known.name}={_value(known, value)}"
    if known.name == _TOKENS or (known.message_type is None and len(value) > _MOST_NUMBERS):
        return f"{known.name}=({len(value)} in all)"
    return f"{known.name}=[{', '.join(_value(known, one) for one in value)}]"


def _value(known: FieldDescriptor, value: Any) -> str:
    if known.message_type is not None:
        return f"{{{_fields(value)}}}"
    if known.enum_type is not None:
        return known.enum_type.values_by_number[value].name if value in known.enum_type.values_by_number else str(value)
    if isinstance(value, bytes):
        return value.hex() if len(value) <= _MOST_NUMBERS else f"({len(value)} bytes)"
    return repr(value)
