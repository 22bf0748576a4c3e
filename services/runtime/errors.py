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
├── GenerationFailed     the engine could not go on
└── RequestGivenUp       engines were lost whenever they worked on it

Without a row, because no call ends with them: the KV manager's ItemRefused, which are written into a StepResult; the
engine's RequestRefused, which concern one of many requests on a stream, so they travel in its messages and the gateway
makes its own errors of them; the engine's ConstraintFailed, which ends one request and travels in its messages too; the
engine's PinRefused, of which its service makes errors of this module; and the engine's ModelUnsupported,
BackendUnavailable, BlockManagerBroken, CopyFailed and DeviceLost, which end the process.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

import kvmanager
from quire.v1 import status_pb2

FIELD_METADATA = "quire-field"
_DETAILS_METADATA = "grpc-status-details-bin"
_PUSHBACK_METADATA = "grpc-retry-pushback-ms"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
_SECONDS_TO_TELL = 1.0
# Where nobody can foresee when there is room.
_COME_AGAIN_SECONDS = 1.0


class RefusalReason(Enum):
    """Why a gateway did not let a request in that had nothing wrong in it."""

    MAX_REQUESTS = "max_requests"  # too many are under way
    MAX_QUEUED_TOKENS = "max_queued_tokens"  # too many tokens wait for engines
    TENANT_REQUESTS = "tenant_requests"  # too many are under way of its tenant
    TENANT_TOKENS = "tenant_tokens"  # the tenant has used up its tokens
    ENGINE_QUEUE = "engine_queue"  # every engine's own queue is full
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"  # no engine of the model takes requests
    UNAUTHENTICATED = "unauthenticated"


class ServiceError(Exception):
    """Base of everything that a service refuses. `field` is the path of the field to blame, empty when none is.

    `refusal` says why a request was not let in, None where it is wrong or had been let in.
    """

    refusal: RefusalReason | None = None

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

    refusal = RefusalReason.UNAUTHENTICATED


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

    `retry_seconds` is when there is room again, as far as that can be foreseen.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        retry_seconds: float = _COME_AGAIN_SECONDS,
        refusal: RefusalReason = RefusalReason.ENGINE_QUEUE,
    ) -> None:
        super().__init__(message, field)
        self.retry_seconds = retry_seconds
        self.refusal = refusal


class SlowClient(ServiceError):
    """The client did not read its stream."""


class Unavailable(ServiceError):
    """Draining, or another service is away."""

    def __init__(self, message: str, field: str = "", refusal: RefusalReason | None = None) -> None:
        super().__init__(message, field)
        self.refusal = refusal


class DeadlinePassed(ServiceError):
    """The time allowed is over."""


class GenerationFailed(ServiceError):
    """The engine could not go on."""


class RequestGivenUp(ServiceError):
    """Engines were lost whenever they worked on it: it is not to be sent again."""


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
    PinTooLarge: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 409),  # to come again is of no use
    Overloaded: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    SlowClient: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 408),
    Unavailable: Status(grpc.StatusCode.UNAVAILABLE, 503),
    DeadlinePassed: Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    GenerationFailed: Status(grpc.StatusCode.INTERNAL, 500),
    RequestGivenUp: Status(grpc.StatusCode.INTERNAL, 500),
}


@asynccontextmanager
async def translated(
    context: grpc.aio.ServicerContext[Any, Any], metadata: dict[str, str] | None = None
) -> AsyncIterator[None]:
    """Turn a domain error raised inside into the call's status.

    The field to blame goes into trailing metadata, and so do when to come again and what is in `metadata` then.
    """
    try:
        yield
    except SlowClient as error:
        await _leave(context, error)
    except tuple(STATUS) as error:
        await context.abort(status_of(error).grpc, str(error), (*_metadata(error), *(metadata or {}).items()))


async def _leave(context: grpc.aio.ServicerContext[Any, Any], error: SlowClient) -> None:
    """End the call of a client that does not read, which would not take the status either.

    gRPC keeps the status behind what it has not sent yet, until the client reads that or closes the connection.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS_TO_TELL):
            await context.abort(status_of(error).grpc, str(error), _metadata(error))
    raise asyncio.CancelledError  # which gRPC takes for a call that has ended


def retry_headers(error: Exception) -> dict[str, str]:
    """Return the headers of HTTP that say when to come again, with every status 429."""
    if not isinstance(error, Overloaded):
        return {}
    seconds = error.retry_seconds
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def _metadata(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    """Return what goes with the status of an error: the field to blame, and when to come again.

    That is told twice: for people's programs, and for the retries that gRPC itself does where a client allows them.
    """
    field, seconds = getattr(error, "field", ""), getattr(error, "retry_seconds", None)
    metadata: tuple[tuple[str, str | bytes], ...] = ((FIELD_METADATA, field),) if field else ()
    if seconds is None:
        return metadata
    details = (_DETAILS_METADATA, _details(error, seconds).SerializeToString())
    return (*metadata, details, (_PUSHBACK_METADATA, str(math.ceil(seconds * 1000))))


def _details(error: Exception, seconds: float) -> status_pb2.Status:
    retry = status_pb2.RetryInfo()
    retry.retry_delay.FromTimedelta(timedelta(seconds=seconds))
    packed = any_pb2.Any(type_url=_RETRY_INFO, value=retry.SerializeToString())
    return status_pb2.Status(code=status_of(error).grpc.value[0], message=str(error), details=[packed])


def status_of(error: Exception) -> Status:
    """Return the status of a domain error: that of the nearest of its types with a row in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
