"""Errors for clients by the reason for which an engine refused a request or failed it."""

from quire.v1 import engine_pb2
from services.runtime.errors import (
    GenerationFailed,
    InvalidField,
    Overloaded,
    RequestExists,
    ServiceError,
    Unavailable,
    UnsupportedField,
)

REFUSALS: dict[int, type[ServiceError]] = {
    engine_pb2.REFUSAL_REASON_ALREADY_EXISTS: RequestExists,
    engine_pb2.REFUSAL_REASON_INVALID: InvalidField,
    engine_pb2.REFUSAL_REASON_QUEUE_FULL: Overloaded,
    engine_pb2.REFUSAL_REASON_UNAVAILABLE: Unavailable,
    engine_pb2.REFUSAL_REASON_UNIMPLEMENTED: UnsupportedField,
    engine_pb2.REFUSAL_REASON_FAILED: GenerationFailed,
}

FAILURES: dict[int, type[ServiceError]] = {
    engine_pb2.FAILURE_REASON_STEP: GenerationFailed,
    engine_pb2.FAILURE_REASON_REQUEST: GenerationFailed,
    engine_pb2.FAILURE_REASON_BLOCK_MANAGER: Unavailable,
    engine_pb2.FAILURE_REASON_CONSTRAINT: InvalidField,
}
"""Without deadlines, whose errors depend on who waited."""
