"""One call of Generate: a link of its own to the engine, which bounds what waits for a slow client."""

from collections.abc import AsyncIterator

from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import decoding_pb2, engine_pb2
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink
from services.engine.guided.constraints import Constraints
from services.engine.request_parser import RequestParser
from services.engine.smg.answers import Answers
from services.engine.smg.field_names import FieldNames
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ServiceError,
    Unavailable,
)
from services.wire.requests.errors import FAILURES, REFUSALS

_FAILURES: dict[int, type[ServiceError]] = {
    **FAILURES,
    engine_pb2.FAILURE_REASON_DEADLINE: DeadlineExceeded,
    engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: DeadlineExceeded,
}


class Generation:
    """Submits one request, and passes on what the engine answers until the request has ended."""

    def __init__(
        self, driver: EngineDriver, constraints: Constraints, submission: engine_pb2.Submission, names: FieldNames
    ) -> None:
        """Make the link; nothing is submitted yet. `names` are those of fields in errors."""
        self.link = GatewayLink()
        self._parser = RequestParser(driver, self.link, constraints)
        self._submission = submission
        self._names = names
        self._aborted = False

    def abort(self) -> None:
        """End the request; its samples then end with the reason `abort`."""
        self._aborted = True
        self._parser.cancel(self._cancel(engine_pb2.CANCEL_REASON_CLIENT))

    async def responses(self, answers: Answers) -> AsyncIterator[smg_pb.GenerateResponse]:
        """Submit the request, and yield its answers. Raises a ServiceError."""
        self._parser.submit(self._submission)
        while True:
            output = await self.link.get() or engine_pb2.StepOutput()
            for refused in output.refused:
                raise _refusal_error(refused, self._names)
            for response in answers.read(output):
                yield response
            while answers.to_end:
                self._parser.cancel(self._cancel(engine_pb2.CANCEL_REASON_STOP_STRING, answers.to_end.pop()))
            for finished in output.finished:
                if not (self._aborted or answers.complete) and (error := _failure_error(finished, self._names)):
                    raise error
                for response in answers.finish(finished.samples):
                    yield response
                return

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        self._parser.close()

    def _cancel(self, reason: engine_pb2.CancelReason.ValueType, sample: int | None = None) -> engine_pb2.Cancel:
        return engine_pb2.Cancel(
            request_id=self._submission.request_id, attempt=self._submission.attempt, reason=reason, sample=sample
        )


def _refusal_error(refused: engine_pb2.RequestRefused, names: FieldNames) -> ServiceError:
    """Return the error of a refusal, with the names that fields have in smg's messages."""
    detail = names.sentence(refused.detail, refused.field)
    return REFUSALS.get(refused.reason, GenerationFailed)(detail, names.field(refused.field))


def _failure_error(finished: engine_pb2.RequestFinished, names: FieldNames) -> ServiceError | None:
    """Return the error of a request that failed or that a stopping engine ended; None for others."""
    reasons = {end.reason for end in finished.samples}
    if finished.failure or decoding_pb2.FINISH_REASON_FAILED in reasons:
        return _FAILURES.get(finished.failure, GenerationFailed)(names.sentence(finished.detail) or "the engine failed")
    if decoding_pb2.FINISH_REASON_CANCELLED in reasons:
        return Unavailable("the engine is shutting down")
    return None
