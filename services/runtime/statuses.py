"""The table of gRPC and HTTP statuses by error.

These errors have no row, because no call ends with them. The KV manager's ItemRefused is part of a StepResult. The
engine's RequestRefused and ConstraintFailed concern one of many requests on a stream: they travel as messages, and the
gateway raises its own errors. The engine's service converts PinRefused to services.runtime.errors. ModelUnsupported,
BackendUnavailable, BlockManagerBroken, CopyFailed, DeviceLost, KeptMemoryLost and RankFailed end the process.
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
_ABORT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0  # that clients of OpenAI and Anthropic should spend on a retry


class Status(NamedTuple):
    """Status of a call, for gRPC and for HTTP."""

    grpc: grpc.StatusCode
    http: int


STATUS: dict[type[Exception], Status] = {
    kvmanager.InvalidRegistration: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.TooManyBlocks: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    kvmanager.InvalidReport: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.StepOutOfOrder: Status(grpc.StatusCode.INVALID_ARGUMENT, 400),
    kvmanager.UnknownRequest: Status(grpc.StatusCode.NOT_FOUND, 404),
    kvmanager.UnknownPool: Status(grpc.StatusCode.NOT_FOUND, 404),
    kvmanager.UnknownKind: Status(grpc.StatusCode.NOT_FOUND, 404),
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
    errors.PinTooLarge: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 409),  # a retry does not help
    errors.Overloaded: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.SlowClient: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 408),
    errors.Unavailable: Status(grpc.StatusCode.UNAVAILABLE, 503),
    errors.DeadlineExceeded: Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    errors.GenerationFailed: Status(grpc.StatusCode.INTERNAL, 500),
    errors.RepeatedEngineLoss: Status(grpc.StatusCode.INTERNAL, 500),
}


@asynccontextmanager
async def abort_on_error(
    context: grpc.aio.ServicerContext[Any, Any], metadata: dict[str, str] | None = None
) -> AsyncIterator[None]:
    """Abort the call with the status of an error raised in the context.

    Trailing metadata has the invalid field, the time of a retry, and `metadata`. A message that could not be sent,
    because the client has ended the call, cancels the task, as gRPC does when that end reaches it, later.
    """
    try:
        try:
            yield
        except SlowClient as error:
            await _leave(context, error)
        except tuple(STATUS) as error:
            await context.abort(status_of(error).grpc, str(error), (*_metadata(error), *(metadata or {}).items()))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def _leave(context: grpc.aio.ServicerContext[Any, Any], error: SlowClient) -> None:
    """End the call of a slow client, which may not read the status either.

    gRPC queues the status after unsent messages, until the client reads them or closes the connection.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_SECONDS):
            await context.abort(status_of(error).grpc, str(error), _metadata(error))
    raise asyncio.CancelledError  # gRPC treats the call as ended


def retry_headers(error: Exception) -> dict[str, str]:
    """Return the HTTP headers with the time of a retry, for every status 429."""
    if not isinstance(error, Overloaded):
        return {}
    seconds = error.retry_seconds
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
    # Clients would wait for hours, or not wait and repeat the request in vain.
    return headers if seconds <= _LONGEST_WAIT_SECONDS else headers | {"x-should-retry": "false"}


def _metadata(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of an error: the invalid field, and the time of a retry.

    The time has two forms: one for applications, and one for gRPC's own retries if the client permits them.
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
    """Return the status of an error, or of the nearest base class in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
