"""The errors of refused and failed requests, by what the engine says of them."""

from quire.v1 import decoding_pb2, engine_pb2
from services.engine.smg.submissions import NAMES
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    Overloaded,
    RequestExists,
    ServiceError,
    Unavailable,
    UnsupportedField,
)

_REFUSALS: dict[int, type[ServiceError]] = {
    engine_pb2.REFUSAL_REASON_ALREADY_EXISTS: RequestExists,
    engine_pb2.REFUSAL_REASON_INVALID: InvalidField,
    engine_pb2.REFUSAL_REASON_QUEUE_FULL: Overloaded,
    engine_pb2.REFUSAL_REASON_UNAVAILABLE: Unavailable,
    engine_pb2.REFUSAL_REASON_UNIMPLEMENTED: UnsupportedField,
    engine_pb2.REFUSAL_REASON_FAILED: GenerationFailed,
}
_FAILURES: dict[int, type[ServiceError]] = {
    engine_pb2.FAILURE_REASON_STEP: GenerationFailed,
    engine_pb2.FAILURE_REASON_REQUEST: GenerationFailed,
    engine_pb2.FAILURE_REASON_BLOCK_MANAGER: Unavailable,
    engine_pb2.FAILURE_REASON_DEADLINE: DeadlineExceeded,
    engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: DeadlineExceeded,
    engine_pb2.FAILURE_REASON_CONSTRAINT: InvalidField,
}


def refusal_error(refused: engine_pb2.RequestRefused) -> ServiceError:
    """Return the error of a refusal, with the name that the field has in smg's messages."""
    name = NAMES.get(refused.field, refused.field)
    detail = refused.detail.replace(refused.field, name) if refused.field else refused.detail
    return _REFUSALS.get(refused.reason, GenerationFailed)(detail, name)


def failure_error(finished: engine_pb2.RequestFinished) -> ServiceError | None:
    """Return the error of a request that failed or that a stopping engine ended; None for others."""
    reasons = {end.reason for end in finished.samples}
    if finished.failure or decoding_pb2.FINISH_REASON_FAILED in reasons:
        return _FAILURES.get(finished.failure, GenerationFailed)(finished.detail or "the engine failed")
    if decoding_pb2.FINISH_REASON_CANCELLED in reasons:
        return Unavailable("the engine is shutting down")
    return None
