"""Messages of an Attach stream: their kinds, and the registration of a pool."""

from dataclasses import fields

from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField, UnexpectedMessage
from services.wire.duration import duration
from services.wire.wire_fields import ENTRY_BYTES, Message, field_at, root_message


def kind_of(data: bytes) -> str:
    """Return the kind of a message of an Attach stream, empty if it has none. Raises DecodeError."""
    if not data:
        return ""
    known = pb.PoolRequest.DESCRIPTOR.fields_by_number.get(field_at(root_message(data), 0).number)
    return known.name if known else ""


def only_field(data: bytes, kind: str) -> Message:
    """Return the only field of a large message. Raises InvalidField if there are more, because engines write one."""
    field = field_at(root_message(data), 0)
    if field.number != pb.PoolRequest.DESCRIPTOR.fields_by_name[kind].number or field.end != len(data):
        raise InvalidField(f"{kind} must be the only field of a message of {len(data)} bytes", kind)
    return root_message(data).of(field, kind)


def register_message(spec: PoolSpec) -> pb.Register:
    """Write the registration of an engine's pool."""
    return pb.Register(**vars(spec))


def spec_of(message: pb.Register) -> PoolSpec:
    """Read the registration of an engine's pool. Raises InvalidRegistration."""
    return PoolSpec(**{field.name: getattr(message, field.name) for field in fields(PoolSpec)})


def read_register(data: bytes) -> PoolSpec:
    """Read a PoolRequest with a Register. Raises InvalidField, InvalidRegistration, DecodeError, UnexpectedMessage."""
    if len(data) > ENTRY_BYTES:
        raise InvalidField(f"register must have at most {ENTRY_BYTES} bytes, not {len(data)}", "register")
    request = pb.PoolRequest.FromString(data)
    if request.WhichOneof("kind") != "register":
        raise UnexpectedMessage(f"expected register, got {request.WhichOneof('kind')}")
    return spec_of(request.register)


def registered_message(epoch: int, session: int, lease_seconds: float) -> pb.PoolResponse:
    """Write that the pool is attached."""
    registered = pb.Registered(manager_epoch=epoch, session=session, lease=duration(lease_seconds))
    return pb.PoolResponse(registered=registered)
