"""What the services refuse beyond their cores, and the one table from domain errors to gRPC status.

ServiceError
├── InvalidField         a field is out of range; `field` is its path
├── UnsupportedField     a part of the contract that this version does not serve; `field` is its path
├── UnexpectedMessage    a message that does not belong at this place of a stream
├── UnknownModel         no such model is served
├── RequestIsLive        the request id is in use
├── UnknownPin           nothing is pinned under the name
├── PinExists            the name is in use for another prefix
├── PinTooLarge          the pool has no room for a prefix beside what is pinned and live
├── Overloaded           a queue is full
├── Unavailable          draining, or another service is away
├── DeadlinePassed       the time allowed is over
└── GenerationFailed     the engine could not go on

Without a row, because no call ends with them: the KV manager's ItemRefused, which are written into a StepResult; the
engine's RequestRefused, which concern one of many requests on a stream, so they travel in its messages and the gateway
makes its own errors of them; the engine's ConstraintFailed, which ends one request and travels in its messages too; the
engine's PinRefused, of which its service makes errors of this module; and the engine's ModelUnsupported,
BackendUnavailable, BlockManagerBroken and CopyFailed, which end the process.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

import kvmanager

FIELD_METADATA = "quire-field"


class ServiceError(Exception):
    """Base of everything that a service refuses. `field` is the path of the field to blame, empty when none is."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidField(ServiceError):
    """A field is out of range."""


class UnsupportedField(ServiceError):
    """A part of the contract that this version does not serve."""


class UnexpectedMessage(ServiceError):
    """A message that does not belong at this place of a stream."""


class UnknownModel(ServiceError):
    """No such model is served."""


class RequestIsLive(ServiceError):
    """The request id is in use."""


class UnknownPin(ServiceError):
    """Nothing is pinned under the name."""


class PinExists(ServiceError):
    """The name is in use for another prefix."""


class PinTooLarge(ServiceError):
    """The pool has no room for a prefix beside what is pinned and live."""


class Overloaded(ServiceError):
    """A queue is full."""


class Unavailable(ServiceError):
    """Draining, or another service is away."""


class DeadlinePassed(ServiceError):
    """The time allowed is over."""


class GenerationFailed(ServiceError):
    """The engine could not go on."""


STATUS: dict[type[Exception], grpc.StatusCode] = {
    kvmanager.InvalidRegistration: grpc.StatusCode.INVALID_ARGUMENT,
    kvmanager.InvalidReport: grpc.StatusCode.INVALID_ARGUMENT,
    kvmanager.StepOutOfOrder: grpc.StatusCode.INVALID_ARGUMENT,
    kvmanager.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    kvmanager.UnknownPool: grpc.StatusCode.NOT_FOUND,
    kvmanager.StaleIncarnation: grpc.StatusCode.ABORTED,
    kvmanager.SessionReplaced: grpc.StatusCode.ABORTED,
    DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedField: grpc.StatusCode.UNIMPLEMENTED,
    UnexpectedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    RequestIsLive: grpc.StatusCode.ALREADY_EXISTS,
    UnknownPin: grpc.StatusCode.NOT_FOUND,
    PinExists: grpc.StatusCode.ALREADY_EXISTS,
    PinTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    GenerationFailed: grpc.StatusCode.INTERNAL,
}


@asynccontextmanager
async def translated(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn a domain error raised inside into the call's status; the field to blame goes into trailing metadata."""
    try:
        yield
    except tuple(STATUS) as error:
        field = getattr(error, "field", "")
        metadata = ((FIELD_METADATA, field),) if field else ()
        await context.abort(status_of(error), str(error), metadata)


def status_of(error: Exception) -> grpc.StatusCode:
    """Return the status of a domain error: that of the nearest of its types with a row in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
