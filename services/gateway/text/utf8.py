"""Finds the text field of a request that is not UTF-8.

Protobuf's parser rejects the whole message and does not name the field. This module parses the message again as unknown
fields and decodes each text field.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.runtime.errors import InvalidField

M = TypeVar("M", bound=Message)

_LENGTH_DELIMITED = 2  # the wire type of texts and messages


def parse_request(message_type: type[M], data: bytes) -> M:
    """Parse a message. Raises InvalidField, which names the field that is not UTF-8, if there is one."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        field = invalid_utf8_field(message_type, data)
        malformed = f"malformed request: not a valid {message_type.DESCRIPTOR.full_name}"
        raise InvalidField(f"{field} is not valid UTF-8" if field else malformed, field) from error


def invalid_utf8_field(message_type: type[Message], data: bytes) -> str:
    """Return the path of the first text field, by field number, that is not UTF-8, such as `stopping.stop_strings[3]`.

    Return an empty string if there is none, or if the message is malformed in another way. The path of a map entry has
    its position on the wire: `labels[2].value`.
    """
    original = cast(Descriptor, message_type.DESCRIPTOR)  # the stubs also name the C type
    try:
        return next(_invalid_paths(original, data), "")
    except DecodeError:
        return ""


def _invalid_paths(message: Descriptor, data: bytes) -> Iterator[str]:
    values = defaultdict[int, list[bytes]](list)
    unknown_fields: Iterable[Any] = UnknownFieldSet(Empty.FromString(data))  # type: ignore[assignment]
    for unknown in unknown_fields:
        if unknown.wire_type == _LENGTH_DELIMITED:
            values[unknown.field_number].append(unknown.data)
    for number in sorted(values.keys() & message.fields_by_number.keys()):
        field = message.fields_by_number[number]
        for index, value in enumerate(values[number]):
            yield from _invalid_in(f"{field.name}[{index}]" if field.is_repeated else field.name, field, value)


def _invalid_in(path: str, field: FieldDescriptor, value: bytes) -> Iterator[str]:
    if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
        yield path
    elif field.message_type is not None:
        yield from (f"{path}.{rest}" for rest in _invalid_paths(field.message_type, value))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
