"""The one table from domain errors to the status of gRPC and HTTP.

Without a row, because no call ends with them: the KV manager's ItemRefused, which are written into a StepResult; the
engine's RequestRefused, which concern one of many requests on a stream, so they travel in its messages and the gateway
makes its own errors of them; the engine's ConstraintFailed, which ends one request and travels in its messages too; the
engine's PinRefused, of which its service makes errors of services.runtime.errors; and the engine's ModelUnsupported,
BackendUnavailable, BlockManagerBroken, CopyFailed and DeviceLost, which end the process.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

import kvmanager
from quire.v1 import status_pb2
from services.runtime import errors
from services.runtime.errors import FIELD_METADATA, Overloaded, SlowClient

_DETAILS_METADATA = "grpc-status-details-bin"
_PUSHBACK_METADATA = "grpc-retry-pushback-ms"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
_SECONDS_TO_TELL = 1.0


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
    errors.InvalidField: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.UnsupportedField: Status(grpc.StatusCode.UNIMPLEMENTED, 400),
    errors.UnexpectedMessage: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.Unauthenticated: Status(grpc.StatusCode.UNAUTHENTICATED, 401),
    errors.PermissionDenied: Status(grpc.StatusCode.PERMISSION_DENIED, 403),
    errors.UnknownModel: Status(grpc.StatusCode.NOT_FOUND, 404),
    errors.RequestExists: Status(grpc.StatusCode.ALREADY_EXISTS, 409),
    errors.UnknownPin: Status(grpc.StatusCode.NOT_FOUND, 404),
    errors.PinExists: Status(grpc.StatusCode.ALREADY_EXISTS, 409),
    errors.PinTooLarge: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 409),  # to come again is of no use
    errors.Overloaded: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.SlowClient: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 408),
    errors.Unavailable: Status(grpc.StatusCode.UNAVAILABLE, 503),
    errors.DeadlineExceeded: Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    errors.GenerationFailed: Status(grpc.StatusCode.INTERNAL, 500),
    errors.RequestGivenUp: Status(grpc.StatusCode.INTERNAL, 500),
}


@asynccontextmanager
async def abort_on_error(
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
