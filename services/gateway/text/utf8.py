"""Names the field when a request's text is not UTF-8.

Protobuf refuses such a message as a whole and does not say why, and gRPC makes an UNKNOWN of that. Here the bytes are
read once more, by a twin of the message type in which every string is bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

M = TypeVar("M", bound=Message)


class RequestParseError(ValueError):
    """Bytes are not a message of the wanted type.

    RequestParseError
    ├── MalformedMessage
    └── InvalidUtf8
    """


class MalformedMessage(RequestParseError):
    """Bytes cannot be parsed at all."""


class InvalidUtf8(RequestParseError):
    """A text field holds bytes that are not UTF-8. `field` is its path, such as `stopping.stop_strings[3]`."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not valid UTF-8")
        self.field = field


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """Stands for a request that could not be parsed: why, and the path of the field at fault where one is known."""

    message: str
    field: str | None


def deserializer(message_type: type[M]) -> Callable[[bytes], M | MalformedRequest]:
    """Return a request deserializer for gRPC that never raises.

    Whatever a deserializer raises, grpc.aio answers UNKNOWN and puts the exception's text into the details.
    """

    def deserialize(data: bytes) -> M | MalformedRequest:
        try:
            return parse_request(message_type, data)
        except RequestParseError as error:
            return MalformedRequest(str(error), getattr(error, "field", None))

    return deserialize


def parse_request(message_type: type[M], data: bytes) -> M:
    """Return the message that the bytes hold. Raises InvalidUtf8 or MalformedMessage."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        field = invalid_utf8_field(message_type, data)
        if field is not None:
            raise InvalidUtf8(field) from error
        raise MalformedMessage(f"the bytes are not a {message_type.DESCRIPTOR.full_name}") from error


def invalid_utf8_field(message_type: type[Message], data: bytes) -> str | None:
    """Return the path of the first text field, by field number, that is not UTF-8.

    None when there is none, or when the bytes cannot be parsed for another reason. An entry of a map is named by its
    place on the wire: `labels[2].value`.
    """
    original = cast(Descriptor, message_type.DESCRIPTOR)  # the stubs also name the C type behind it
    try:
        twin = _twin(original).FromString(data)
    except DecodeError:
        return None
    return next(_invalid_paths(twin, original), None)


def _invalid_paths(twin: Message, original: Descriptor) -> Iterator[str]:
    for field, value in twin.ListFields():
        for path, item in _items(field, value):
            yield from _invalid_in(path, item, original.fields_by_name[field.name])


def _items(field: FieldDescriptor, value: Any) -> list[tuple[str, Any]]:
    if not field.is_repeated:
        return [(field.name, value)]
    return [(f"{field.name}[{index}]", item) for index, item in enumerate(value)]


def _invalid_in(path: str, item: Any, original: FieldDescriptor) -> Iterator[str]:
    if original.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item):
        yield path
    elif original.message_type is not None:
        for rest in _invalid_paths(item, original.message_type):
            yield f"{path}.{rest}"


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache
def _twin(descriptor: Descriptor) -> type[Message]:
    """Make a type that is the same on the wire, with bytes where the original has text."""
    pool = DescriptorPool()  # apart from the default one, where the names are taken
    for file in _imported_first(descriptor.file).values():
        pool.AddSerializedFile(_without_strings(file).SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _imported_first(file: FileDescriptor) -> dict[str, FileDescriptor]:
    """List a file and all that it imports by name, each after its own imports."""
    files: dict[str, FileDescriptor] = {}
    for imported in file.dependencies:
        files |= _imported_first(imported)
    return files | {file.name: file}


def _without_strings(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _make_strings_bytes(message)
    return proto


def _make_strings_bytes(message: DescriptorProto) -> None:
    message.options.ClearField("map_entry")  # bytes cannot be keys of a map; on the wire it is a list of entries
    for field in message.field:
        if field.type == FieldDescriptorProto.TYPE_STRING:
            field.type = FieldDescriptorProto.TYPE_BYTES
    for nested in message.nested_type:
        _make_strings_bytes(nested)
