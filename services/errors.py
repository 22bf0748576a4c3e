"""What the services refuse beyond their cores, and the one table from domain errors to the status of gRPC and HTTP.

ServiceError
├── InvalidField         a field is out of range; `field` is its path
├── UnsupportedField     a part of the contract that this version does not serve; `field` is its path
├── UnexpectedMessage    a message that does not belong at this place of a stream
├── Unauthenticated      the API key is missing, wrong or expired
├── NotPermitted         the API key does not allow it
├── UnknownModel         no such model is served
├── RequestIsLive        the request id is in use
├── UnknownPin           nothing is pinned under the name
├── PinExists            the name is in use for another prefix
├── PinTooLarge          the pool has no room for a prefix beside what is pinned and live
├── Overloaded           a queue is full, or a tenant at its limit; `retry_seconds` says when to come again
├── SlowClient           the client did not read its stream
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
from typing import Any, NamedTuple

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


class Unauthenticated(ServiceError):
    """The API key is missing, wrong or expired."""


class NotPermitted(ServiceError):
    """The API key does not allow it."""


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
    """A queue is full, or a tenant at its limit.

    `retry_seconds` is when there is room again, as far as that can be foreseen; None: it cannot.
    """

    def __init__(self, message: str, field: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message, field)
        self.retry_seconds = retry_seconds


class SlowClient(ServiceError):
    """The client did not read its stream."""


class Unavailable(ServiceError):
    """Draining, or another service is away."""


class DeadlinePassed(ServiceError):
    """The time allowed is over."""


class GenerationFailed(ServiceError):
    """The engine could not go on."""


class Status(NamedTuple):
    """How a call ends: the status of gRPC, and that of HTTP."""

    grpc: grpc.StatusCode
    http: int


STATUS: dict[type[Exception], Status] = {
    kvmanager.InvalidRegistration: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.InvalidReport: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.StepOutOfOrder: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.UnknownRequest: Status(grpc.StatusCode.NOT_FOUND, 404),
    kvmanager.UnknownPool: Status(grpc.StatusCode.NOT_FOUND, 404),
    kvmanager.StaleIncarnation: Status(grpc.StatusCode.ABORTED, 409),
    kvmanager.SessionReplaced: Status(grpc.StatusCode.ABORTED, 409),
    DecodeError: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    InvalidField: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    UnsupportedField: Status(grpc.StatusCode.UNIMPLEMENTED, 400),
    UnexpectedMessage: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    Unauthenticated: Status(grpc.StatusCode.UNAUTHENTICATED, 401),
    NotPermitted: Status(grpc.StatusCode.PERMISSION_DENIED, 403),
    UnknownModel: Status(grpc.StatusCode.NOT_FOUND, 404),
    RequestIsLive: Status(grpc.StatusCode.ALREADY_EXISTS, 409),
    UnknownPin: Status(grpc.StatusCode.NOT_FOUND, 404),
    PinExists: Status(grpc.StatusCode.ALREADY_EXISTS, 409),
    PinTooLarge: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Overloaded: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    SlowClient: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 408),
    Unavailable: Status(grpc.StatusCode.UNAVAILABLE, 503),
    DeadlinePassed: Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    GenerationFailed: Status(grpc.StatusCode.INTERNAL, 500),
}


@asynccontextmanager
async def translated(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn a domain error raised inside into the call's status; the field to blame goes into trailing metadata."""
    try:
        yield
    except tuple(STATUS) as error:
        field = getattr(error, "field", "")
        metadata = ((FIELD_METADATA, field),) if field else ()
        await context.abort(status_of(error).grpc, str(error), metadata)


def status_of(error: Exception) -> Status:
    """Return the status of a domain error: that of the nearest of its types with a row in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
