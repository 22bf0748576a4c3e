"""Messages of an Attach stream: which one it is, and how a pool is registered."""

from dataclasses import fields

from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField, UnexpectedMessage
from services.wire.duration import duration
from services.wire.wire_fields import ENTRY_BYTES, Message, field_at, whole


def kind_of(data: bytes) -> str:
    """Return which message of an Attach stream this is, empty for none. Raises DecodeError."""
    if not data:
        return ""
    known = pb.PoolRequest.DESCRIPTOR.fields_by_number.get(field_at(whole(data), 0).number)
    return known.name if known else ""


def only_field(data: bytes, kind: str) -> Message:
    """Return the one field of a large message. Raises InvalidField where there are more, which no engine writes."""
    field = field_at(whole(data), 0)
    if field.number != pb.PoolRequest.DESCRIPTOR.fields_by_name[kind].number or field.end != len(data):
        raise InvalidField(f"a message of {len(data)} bytes is not one {kind}", kind)
    return whole(data).of(field, kind)


def register_message(spec: PoolSpec) -> pb.Register:
    """Write what an engine says of its pool."""
    return pb.Register(**vars(spec))


def spec_of(message: pb.Register) -> PoolSpec:
    """Read the pool that an engine describes. Raises InvalidRegistration."""
    return PoolSpec(**{field.name: getattr(message, field.name) for field in fields(PoolSpec)})


def read_register(data: bytes) -> PoolSpec:
    """Read a PoolRequest with a Register. Raises InvalidField, InvalidRegistration, DecodeError, UnexpectedMessage."""
    if len(data) > ENTRY_BYTES:
        raise InvalidField(f"register has {len(data)} bytes, {ENTRY_BYTES} at most", "register")
    request = pb.PoolRequest.FromString(data)
    if request.WhichOneof("kind") != "register":
        raise UnexpectedMessage(f"expected register, got {request.WhichOneof('kind')}")
    return spec_of(request.register)


def registered_message(epoch: int, session: int, lease_seconds: float) -> pb.PoolResponse:
    """Write that the pool is attached."""
    registered = pb.Registered(manager_epoch=epoch, session=session, lease=duration(lease_seconds))
    return pb.PoolResponse(registered=registered)
