"""Reports each request at its end: one log line, and its span in a trace.

Both contain only the lengths of prompts and outputs. Client errors are reported by their field alone, because their
message may quote the prompt.
"""

import asyncio
import logging
from typing import Any

import grpc

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.namespace import qualified
from services.gateway.observe.observer import GatewayObserver, RequestInfo, RequestObserver, RequestProgress
from services.runtime.errors import DeadlineExceeded, SlowClient
from services.runtime.statuses import STATUS, status_of
from services.runtime.tracing.spans import NO_SPAN, Attributes
from services.wire.field_rules import numbers_of

_MAX_ID_CHARACTERS = 128  # the id was not checked yet
_DIGITS = 6  # of seconds
_FINISH_REASONS = {decoding_pb2.FINISH_REASON_STOP: "stop", decoding_pb2.FINISH_REASON_LENGTH: "length"}
_CLIENT_ERRORS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)
_SERVER_ERRORS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
# vLLM's finish reasons of requests that did not finish.
_UNFINISHED = {
    grpc.StatusCode.CANCELLED: "abort",
    grpc.StatusCode.DEADLINE_EXCEEDED: "abort",
    grpc.StatusCode.INTERNAL: "error",
    grpc.StatusCode.UNAVAILABLE: "error",
}

log = logging.getLogger("quire.gateway.requests")


class RequestLog(GatewayObserver):
    """Reports each request of a gateway at its end."""

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Return the observer that reports this request."""
        return _Report(request)


class _Report(RequestObserver):
    def __init__(self, request: RequestInfo) -> None:
        self._request = request
        self._request_id = request.request_id[:_MAX_ID_CHARACTERS]
        self._progress: RequestProgress | None = None
        self._finished: gateway_pb2.Finished | None = None
        self._status: grpc.StatusCode | None = None
        self._model_defaults = ""

    def on_admitted(self, request_id: str) -> None:
        self._request_id = request_id
        self._request.span.add_event("admitted")

    def on_prepared(self, progress: RequestProgress) -> None:
        self._progress = progress

    def on_started(self, started: gateway_pb2.Started) -> None:
        self._model_defaults = numbers_of(started.model_defaults)

    def on_slow_client(self) -> None:
        self._status = STATUS[SlowClient].grpc

    def on_deadline_exceeded(self, *, queued: bool) -> None:
        del queued
        self._status = STATUS[DeadlineExceeded].grpc

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        self._finished = finished
        self._report(grpc.StatusCode.OK, None, now)

    def on_failed(self, error: BaseException, now: float) -> None:
        self._report(self._status or _status_of(error), error, now)

    def _report(self, status: grpc.StatusCode, error: BaseException | None, now: float) -> None:
        seconds, span = now - self._request.arrival, self._request.span
        level = logging.WARNING if status in _SERVER_ERRORS else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request ended", extra=self._fields(status, error, seconds))
        if span is not NO_SPAN:
            span.set_attributes(self._attributes(seconds))
            span.end("" if status is grpc.StatusCode.OK else status.name)

    def _fields(self, status: grpc.StatusCode, error: BaseException | None, seconds: float) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": qualified(self._request.origin.caller.tenant, self._request_id),
            "model": self._request.model_name,
            "protocol": self._request.origin.protocol,
            "status": status.name,
            "e2e_seconds": round(seconds, _DIGITS),
            "client_gone": status is grpc.StatusCode.CANCELLED,
            "slow_client": self._status is STATUS[SlowClient].grpc,
        }
        if tenant := self._request.origin.caller.tenant:
            fields["tenant"] = tenant
        if client_id := self._request.origin.client_request_id:
            fields["client_request_id"] = client_id
        if self._model_defaults:
            fields["model_defaults"] = self._model_defaults
        if self._progress is not None:
            fields |= _progress_fields(self._progress, self._request.arrival)
        if self._finished is not None:
            fields |= _finish_fields(self._finished)
        elif status in _UNFINISHED:
            fields["finish_reason"] = _UNFINISHED[status]
        if self._request.span.trace_id:
            fields["trace_id"] = self._request.span.trace_id
        if status in _CLIENT_ERRORS:
            fields["field"] = getattr(error, "field", "")
        elif isinstance(error, tuple(STATUS)):
            fields["error"] = str(error)
        return fields

    def _attributes(self, seconds: float) -> Attributes:
        """Return the attributes of vLLM's spans, and our own."""
        attributes: dict[str, Any] = {
            "gen_ai.request.id": qualified(self._request.origin.caller.tenant, self._request_id),
            "gen_ai.response.model": self._request.model_name,
            "gen_ai.latency.e2e": seconds,
            "quire.tenant": self._request.origin.caller.tenant,
            "quire.protocol": self._request.origin.protocol,
        }
        if client_id := self._request.origin.client_request_id:
            attributes["quire.client_request_id"] = client_id
        if (progress := self._progress) is not None:
            attributes |= {
                "gen_ai.usage.prompt_tokens": progress.prompt_tokens,
                "gen_ai.usage.completion_tokens": progress.generated_tokens,
                "quire.attempts": progress.attempts,
            }
            if progress.first_token_at is not None:
                attributes["gen_ai.latency.time_to_first_token"] = progress.first_token_at - self._request.arrival
        return attributes


def _status_of(error: BaseException) -> grpc.StatusCode:
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    if isinstance(error, Exception) and isinstance(error, tuple(STATUS)):
        return status_of(error).grpc
    return grpc.StatusCode.INTERNAL


def _progress_fields(progress: RequestProgress, arrival: float) -> dict[str, Any]:
    fields = {
        "engine": progress.engine_id,
        "attempts": progress.attempts,
        "failovers": progress.failovers,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "generation_tokens": progress.generated_tokens,
    }
    if (first := progress.first_token_at) is not None:
        fields["ttft_seconds"] = round(first - arrival, _DIGITS)
    return fields


def _finish_fields(finished: gateway_pb2.Finished) -> dict[str, Any]:
    """Return the finish reasons of the samples, each once, and the queue time."""
    reasons = dict.fromkeys(_FINISH_REASONS.get(sample.reason, "abort") for sample in finished.samples)
    return {
        "finish_reason": ",".join(reasons),
        "queue_seconds": round(finished.timing.queued.ToTimedelta().total_seconds(), _DIGITS),
        "preemptions": finished.timing.preemptions,
    }
