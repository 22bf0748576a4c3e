"""What is told of each request when it has ended: one line of the log, and its part of a trace.

Neither says anything of what was asked and answered but its length. Errors that blame the client name the field, and
do not tell their words here, which may repeat some of it.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.access.namespace import qualified
from services.gateway.generation import Generation
from services.runtime.errors import DeadlinePassed, SlowClient
from services.runtime.statuses import STATUS, status_of
from services.runtime.tracing import NO_SPAN, Attributes, Tracing

_MOST_NAME = 128  # of what a client gave and nobody has checked
_DIGITS = 6  # of seconds
_FINISH_REASONS = {decoding_pb2.FINISH_REASON_STOP: "stop", decoding_pb2.FINISH_REASON_LENGTH: "length"}
_CLIENTS_FAULTS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)
_OUR_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
# vLLM's words, of requests that an engine may have begun.
_UNFINISHED = {
    grpc.StatusCode.CANCELLED: "abort",
    grpc.StatusCode.DEADLINE_EXCEEDED: "abort",
    grpc.StatusCode.INTERNAL: "error",
    grpc.StatusCode.UNAVAILABLE: "error",
}

log = logging.getLogger("quire.gateway.requests")


class RequestReports:
    """Makes the reports of a gateway's requests. `clock` is the event loop's, in seconds."""

    def __init__(self, tracing: Tracing, clock: Callable[[], float]) -> None:
        self._tracing = tracing
        self._clock = clock

    def begin(self, request_id: str, model: str, origin: Origin, arrival: float) -> "RequestReport":
        """Begin that of a request, of which nothing is known to be right yet; `model`: empty, or one that is served."""
        report = RequestReport(request_id, model, origin, arrival, self._clock)
        report.span = self._tracing.begin("generate", origin.trace_parent, at=arrival)
        return report


class RequestReport:
    """Hears what becomes of a request, and tells it at the end of the context that it is."""

    def __init__(self, request_id: str, model: str, origin: Origin, arrival: float, clock: Callable[[], float]) -> None:
        self.span = NO_SPAN
        self._origin = origin
        self._arrival = arrival
        self._clock = clock
        self._model = model
        self._request_id = request_id[:_MOST_NAME]
        self._generation: Generation | None = None
        self._finished: gateway_pb2.Finished | None = None
        self._status: grpc.StatusCode | None = None

    def admitted(self, request_id: str, model: str) -> None:
        """The request was let in, and has its id."""
        self._request_id, self._model = request_id, model
        self.span.event("admitted")

    def submitted(self, generation: Generation) -> None:
        """An engine has got it."""
        self._generation = generation

    def finished(self, finished: gateway_pb2.Finished) -> None:
        """It has been answered to the end."""
        self._finished = finished

    def deadline_passed(self) -> None:
        """Its time was over, however the call learns of it."""
        self._status = STATUS[DeadlinePassed].grpc

    def client_is_slow(self) -> None:
        """It was ended because its client did not read."""
        self._status = STATUS[SlowClient].grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        status = self._ending(error)
        self._log(status, error)
        if self.span is not NO_SPAN:
            self.span.note(self._attributes())
            self.span.end("" if status is grpc.StatusCode.OK else status.name)

    def _ending(self, error: BaseException | None) -> grpc.StatusCode:
        if self._finished is not None or error is None:
            return grpc.StatusCode.OK
        if self._status is not None:
            return self._status
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            return grpc.StatusCode.CANCELLED
        if isinstance(error, Exception) and isinstance(error, tuple(STATUS)):
            return status_of(error).grpc
        return grpc.StatusCode.INTERNAL

    def _log(self, status: grpc.StatusCode, error: BaseException | None) -> None:
        level = logging.WARNING if status in _OUR_FAULTS else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request ended", extra=self._fields(status, error))

    def _fields(self, status: grpc.StatusCode, error: BaseException | None) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": qualified(self._origin.caller.tenant, self._request_id),
            "model": self._model,
            "protocol": self._origin.protocol,
            "status": status.name,
            "e2e_seconds": round(self._clock() - self._arrival, _DIGITS),
            "client_gone": status is grpc.StatusCode.CANCELLED,
            "slow_client": self._status is STATUS[SlowClient].grpc,
        }
        if tenant := self._origin.caller.tenant:
            fields["tenant"] = tenant
        if self._generation is not None:
            fields |= _counted(self._generation)
        if self._finished is not None:
            fields |= _finish(self._finished)
        elif status in _UNFINISHED:
            fields["finish_reason"] = _UNFINISHED[status]
        if self.span.trace_id:
            fields["trace_id"] = self.span.trace_id
        if status in _CLIENTS_FAULTS:
            fields["field"] = getattr(error, "field", "")
        elif isinstance(error, tuple(STATUS)):
            fields["error"] = str(error)
        return fields

    def _attributes(self) -> Attributes:
        """Return what vLLM's spans say, under the same names, and ours."""
        attributes: dict[str, Any] = {
            "gen_ai.request.id": qualified(self._origin.caller.tenant, self._request_id),
            "gen_ai.response.model": self._model,
            "gen_ai.latency.e2e": self._clock() - self._arrival,
            "quire.tenant": self._origin.caller.tenant,
            "quire.protocol": self._origin.protocol,
        }
        if (generation := self._generation) is not None:
            attributes |= {
                "gen_ai.usage.prompt_tokens": len(generation.submission.prompt_token_ids),
                "gen_ai.usage.completion_tokens": generation.generated_tokens,
                "quire.attempts": generation.attempts,
            }
            if generation.first_token_at is not None:
                attributes["gen_ai.latency.time_to_first_token"] = generation.first_token_at - self._arrival
        return attributes


def _counted(generation: Generation) -> dict[str, Any]:
    fields = {
        "engine": generation.engine_id,
        "attempts": generation.attempts,
        "failovers": generation.failovers,
        "prompt_tokens": len(generation.submission.prompt_token_ids),
        "cached_tokens": generation.cached_tokens,
        "generation_tokens": generation.generated_tokens,
    }
    if (first := generation.first_token_at) is not None:
        fields["ttft_seconds"] = round(first - generation.arrival, _DIGITS)
    return fields


def _finish(finished: gateway_pb2.Finished) -> dict[str, Any]:
    """Return how its samples ended, each way once, and what it waited for."""
    ways = dict.fromkeys(_FINISH_REASONS.get(sample.reason, "abort") for sample in finished.samples)
    return {
        "finish_reason": ",".join(ways),
        "queue_seconds": round(finished.timing.queued.ToTimedelta().total_seconds(), _DIGITS),
        "preemptions": finished.timing.preemptions,
    }
