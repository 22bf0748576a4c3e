"""Messages of an Attach stream: their kinds, and the registration of a pool."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields

from google.protobuf.unknown_fields import UnknownFieldSet

from blocks import WindowKind
from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField, UnexpectedMessage, UnsupportedField
from services.runtime.http.validation import shown
from services.wire.duration import duration
from services.wire.features import MANAGER_FEATURES
from services.wire.wire_fields import ENTRY_BYTES, Message, field_at, root_message

_SHOWN_FEATURES = 4

log = logging.getLogger("quire.kvmanager")


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


def register_message(spec: PoolSpec, needs: Sequence[str] = ()) -> pb.Register:
    """Write the registration of an engine's pool, which needs these features of its manager."""
    fields_ = vars(spec) | {"needs": needs}
    kinds = map(window_kind_message, fields_.pop("windows"))
    return pb.Register(**fields_, kinds=kinds)


def window_kind_message(kind: WindowKind) -> pb.WindowKind:
    """Write a window kind of a pool."""
    return pb.WindowKind(**vars(kind))


def spec_of(message: pb.Register) -> PoolSpec:
    """Read the registration of an engine's pool. Raises InvalidRegistration."""
    given = {field.name: getattr(message, field.name) for field in fields(PoolSpec) if field.name != "windows"}
    return PoolSpec(**given, windows=tuple(map(_window_kind, message.kinds)))


def _window_kind(message: pb.WindowKind) -> WindowKind:
    return WindowKind(**{field.name: getattr(message, field.name) for field in fields(WindowKind)})


def read_register(data: bytes) -> PoolSpec:
    """Read a PoolRequest with a Register.

    Raises UnsupportedField for a feature that the engine needs and this version lacks; InvalidField,
    InvalidRegistration, DecodeError and UnexpectedMessage. A field that this version does not know is logged: what the
    engine needs stands in `needs`.
    """
    if len(data) > ENTRY_BYTES:
        raise InvalidField(f"register must have at most {ENTRY_BYTES} bytes, not {len(data)}", "register")
    request = pb.PoolRequest.FromString(data)
    if request.WhichOneof("kind") != "register":
        raise UnexpectedMessage(f"expected register, got {request.WhichOneof('kind')}")
    if missing := missing_features(request.register.needs):
        lacking = ", ".join(shown(name) for name in missing[:_SHOWN_FEATURES])
        message = f"register.needs has {lacking}, which this KV manager lacks: it is of an older version"
        raise UnsupportedField(message, "register.needs")
    unknown = UnknownFieldSet(request.register)
    for index in range(len(unknown)):
        log.warning("register has field %d, which this version ignores", unknown[index].field_number)
    return spec_of(request.register)


def missing_features(needs: Iterable[str]) -> list[str]:
    """Return the features that an engine needs and this version lacks."""
    return [name for name in needs if name not in MANAGER_FEATURES]


def registered_message(epoch: int, session: int, lease_seconds: float) -> pb.PoolResponse:
    """Write that the pool is attached, and what this manager knows."""
    lease = duration(lease_seconds)
    registered = pb.Registered(manager_epoch=epoch, session=session, lease=lease, features=MANAGER_FEATURES)
    return pb.PoolResponse(registered=registered)
