"""Names the text field of a request that is not UTF-8.

Protobuf refuses such a message as a whole and does not say why. Here its bytes are read once more as unknown fields,
and each that is text is decoded.
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
    """Return the message that the bytes hold. Raises InvalidField; its field is the text that is not UTF-8, if any."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        field = invalid_utf8_field(message_type, data)
        fault = f"{field} is not valid UTF-8" if field else f"the bytes are not a {message_type.DESCRIPTOR.full_name}"
        raise InvalidField(fault, field) from error


def invalid_utf8_field(message_type: type[Message], data: bytes) -> str:
    """Return the path of the first text field, by field number, that is not UTF-8: `stopping.stop_strings[3]`.

    Empty when there is none before the bytes cannot be parsed for another reason. An entry of a map is named by its
    place on the wire: `labels[2].value`.
    """
    original = cast(Descriptor, message_type.DESCRIPTOR)  # the stubs also name the C type behind it
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
